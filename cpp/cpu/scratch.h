// The buffers that one thread works in. Everything in them is dense float32 (or pairs of bfloat16),
// as the kernels of isa.h want it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

#include "cpu/isa.h"

namespace preflash::cpu {

// Layout of query rows, keys and values in scratch memory, the same for all items of a launch.
struct ScratchShape {
  int tile_rows = 0;   // whole panels
  int panel_rows = 0;  // kRowVecs vectors of them
  int tile_keys = 0;
  int units = 0;  // 32-bit units of a q or k row
  int ld_k = 0;
  int ld_v = 0;

  int mask_words() const { return ceil_div(tile_keys, kMaskWordKeys); }  // of a row and tile
};

// A block of query rows, one to a lane.
struct Panel {
  int row = 0;   // the first, counted from that of the item
  int live = 0;  // rows that are there
  int ld = 0;    // rows that it is wide: whole vectors
};

// One thread's buffers, reused from launch to launch and grown when a launch needs more.
class Scratch {
 public:
  float* q;             // [panels][units][panel rows], or [rows][ld_k] in a panel of few rows
  float* q_rows;        // [panel_rows][ld_k], before they are transposed
  float* k;             // [tile keys][ld_k]
  float* v;             // [tile keys][ld_v]
  float* scores;        // [tile keys][panel_rows]
  float* o;             // [tile rows][ld_v]
  float* row_max;       // [tile rows]
  float* row_sum;       // [tile rows]
  float* rescale;       // [panel_rows]
  float* slope;         // [tile rows], of a LinearBias
  float* distance;      // [panel_rows], of a LinearBias
  float* angles;        // [ld_k], RoPE: cosines and sines of a tile's origin
  std::uint32_t* keep;  // [mask_words][panel_rows]

  static Scratch& of_this_thread(const ScratchShape& shape) {
    thread_local Scratch scratch;
    scratch.lay_out(shape);
    return scratch;
  }

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

 private:
  void lay_out(const ScratchShape& shape) {
    const std::size_t rows = shape.tile_rows, panel = shape.panel_rows;
    const std::size_t keys = shape.tile_keys, ld_k = shape.ld_k, ld_v = shape.ld_v;
    auto place = [&](std::byte* base) {
      std::size_t used = 0;
      auto take = [&]<class T>(T*& pointer, std::size_t count) {
        if (base != nullptr) pointer = reinterpret_cast<T*>(base + used);
        used += ceil_div(count * sizeof(T), std::size_t{kCacheLine}) * kCacheLine;
      };
      take(q, rows * ld_k);
      take(q_rows, panel * ld_k);
      take(k, keys * ld_k);
      take(v, keys * ld_v);
      take(scores, keys * panel);
      take(o, rows * ld_v);
      take(row_max, rows);
      take(row_sum, rows);
      take(rescale, panel);
      take(slope, rows);
      take(distance, panel);
      take(angles, ld_k);
      take(keep, shape.mask_words() * panel);
      return used;
    };
    const std::size_t needed = place(nullptr);
    if (needed > size_) {
      release();
      memory_ = static_cast<std::byte*>(operator new(needed, std::align_val_t{kCacheLine}));
      size_ = needed;
    }
    place(memory_);
  }
  void release() {
    operator delete(memory_, std::align_val_t{kCacheLine});
    memory_ = nullptr;
    size_ = 0;
  }

  std::byte* memory_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace preflash::cpu
