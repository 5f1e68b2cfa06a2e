// The arithmetic of the CPU backend, one table of functions per instruction set. The files behind
// the tables are compiled with wider instructions than the rest of the program, so they include
// nothing that other files instantiate (no mask_range.h, no standard library templates): the linker
// may keep either copy of a shared inline function, and the wide one would trap on an older
// machine.
//
// Everything a table works on is dense scratch memory: forward.cpp gathers rows, pages and masks.
#pragma once

#include <cstdint>

#include "preflash/types.h"

namespace preflash::cpu {

inline constexpr int kCacheLine = 64;
inline constexpr int kRowVecs = 2;        // vectors of query rows in one panel, at most
inline constexpr int kMaskWordKeys = 32;  // keys per word of keep bits
inline constexpr int kFewRows = 4;        // panels of at most so many rows may keep q untransposed

// logit * log2(e) = factor * score, where score = scale * dot, or cap * tanh(scale_in_cap * dot)
// where cap > 0, plus the bias. The factor is folded into the exponent, where the product is not
// rounded.
struct LogitRule {
  float factor = 1.0f;  // > 0, so that the largest score has the largest logit; 1 with a cap
  float scale = 1.0f;   // the rest of the scale: without a factor, all; else its sign
  float cap = 0.0f;
  float scale_in_cap = 0.0f;
};

// A bias that is linear in the key: slope[row] * (distance[row] + key) on top of each score.
struct LinearBias {
  const float* slope = nullptr;     // [ld], in units of scores; null: no bias
  const float* distance = nullptr;  // [ld], from the row's reference key to key 0 of the tile
};

// A panel is a block of query rows that fills kRowVecs vectors: one query row per lane. Scores are
// kept transposed ([key][row]), so that the online softmax never reduces across lanes, keys and
// values are read row by row as they lie in memory, and the scores are the packed operand of P * V.
struct PanelStep {
  // Query rows, transposed. A unit is 32 bits: one float, or a pair of adjacent bfloat16.
  const float* q = nullptr;  // [units][ld]; [rows][ld_k] if `few`
  bool few = false;          // lanes run along the head dimension, so the dot products' bits differ
  int ld = 0;                // rows of the panel: vectors * lanes
  int units = 0;
  int rows = 0;  // live rows, <= ld

  // The key tile. Only keys [key_begin, key_end) of it are read.
  const float* k = nullptr;  // [tile keys][ld_k], zero from `units` up to a whole vector
  std::int64_t ld_k = 0;
  const float* v = nullptr;  // [tile keys][ld_v], zero from head_dim_vo up to a whole vector
  std::int64_t ld_v = 0;
  int vo_vecs = 0;  // ceil(head_dim_vo / lanes)
  int key_begin = 0;
  int key_end = 0;

  // Bit j % 32 of keep[(j / 32) * ld + row]: whether the row sees key j. Null: it sees all.
  const std::uint32_t* keep = nullptr;

  LogitRule logits;
  LinearBias bias;

  // True if the tile is skipped when no row has a weight of 2^margin or more in it, relative to the
  // row's maximum so far; margin <= 0.
  bool skips = false;
  float margin = 0.0f;

  float* scores = nullptr;   // [tile keys][ld] scratch
  float* rescale = nullptr;  // [ld] scratch

  // Running state of the online softmax, updated in place.
  float* row_max =
      nullptr;  // [ld] of scores, before `factor`; -inf before the first key that the row sees
  float* row_sum = nullptr;  // [ld] of weights
  float* o = nullptr;        // [rows of the panel][ld_v], not normalised
};

// Cosines and sines of one angle for each pair of dimensions.
struct Angles {
  const float* cosines = nullptr;
  const float* sines = nullptr;
};

struct IsaKernels {
  const char* name = nullptr;
  int lanes = 0;
  // A row's weights are 2^(score * factor - c), one fused multiply-add, relative to the rounded
  // product c = row_max * factor. That any number near the maximum will do holds up to |c| = 2^24,
  // where half an ulp is half a bit; at 2^31 it is 128 bits, and every weight would be 0. From |c|
  // = huge_logit on a row is huge: its weights are 2^((score - row_max) * factor), relative to the
  // exact product.
  float huge_logit = 0.0f;  // a power of two

  // One row of n elements, from storage to float32 and back. `scale` is multiplied in. Nothing is
  // narrowed to e5m2; what is too large for e4m3, which has no infinity, becomes its largest
  // number.
  void (*widen)(DType dtype, const void* source, float* target, int n) = nullptr;
  void (*narrow)(DType dtype, const float* source, float scale, void* target, int n) = nullptr;
  // target += weight * source
  void (*accumulate)(float weight, const float* source, float* target, int n) = nullptr;

  // RoPE: turns each pair (row[i], row[half + i]) by the sum of two angles, in place.
  void (*rotate)(float* row, int half, const Angles& a, const Angles& b) = nullptr;

  // Folds one key tile into a panel's softmax state and output.
  void (*attend)(const PanelStep&) = nullptr;             // units are floats
  void (*attend_bf16_pairs)(const PanelStep&) = nullptr;  // pairs of bfloat16; null: not here
};

const IsaKernels* generic_kernels();
const IsaKernels* avx2_kernels();    // only in builds with PREFLASH_HAVE_AVX2
const IsaKernels* avx512_kernels();  // PREFLASH_HAVE_AVX512

// The widest table that this machine runs. The environment variable PREFLASH_CPU_ISA (generic, avx2
// or avx512), read once, asks for none wider than that; a table that cannot run here is not chosen.
// Throws std::invalid_argument, at every call, where the variable holds another word.
const IsaKernels& isa_kernels();

}  // namespace preflash::cpu
