// Two warps that share rows: each has half of the columns of O and of S. They exchange what the
// softmax needs of whole rows, and P, whose columns are the depth of O += P V.
//
// A tile takes two barriers of the pair: one after the row maxima, one after P. Each barrier also
// means that the peer has read the other exchange of the tile before.
#pragma once

#include "kernels/sm80/forward_traits.cuh"

namespace preflash::sm80 {

// The A operands of O += P V: 16 keys of the warp's rows each.
template <class Traits>
using OperandP = std::uint32_t[Traits::kTileN / 16][Traits::kMmaM][4];

// kColumnWarps = 1: a warp has its rows for itself.
template <class Traits, int kColumnWarps = Traits::kColumnWarps>
struct RowPeers {
  __device__ __forceinline__ RowPeers(SharedStorage<Traits>&, int) {}

  __device__ __forceinline__ static constexpr bool first() { return true; }
  template <class Values>
  __device__ __forceinline__ static void max(Values&) {}
  template <class Values>
  __device__ __forceinline__ static void sum(Values&) {}
  // pairs: P as pairs of elements, ((1, 2), MMA_M, MMA_N). The accumulators of two 8-key blocks are
  // the A operand of one 16-key product.
  template <class Pairs>
  __device__ __forceinline__ static void exchange(const Pairs& pairs, OperandP<Traits>& p) {
    CUTE_UNROLL
    for (int depth = 0; depth < Traits::kTileN / 16; ++depth) {
      CUTE_UNROLL
      for (int m = 0; m < Traits::kMmaM; ++m) {
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) p[depth][m][i] = pairs(i % 2, m, 2 * depth + i / 2);
      }
    }
  }
};

template <class Traits>
struct RowPeers<Traits, 2> {
  using Storage = PeerStorage<Traits>;
  static constexpr int kRowBytes = sizeof(Storage::p[0]);
  static constexpr int kWarpBytes = Traits::kWarpKeys * sizeof(Storage::p[0][0]);
  static constexpr int kFirstBarrier = 1;  // __syncthreads() has 0

  Storage& storage;
  int lane;
  int row_warp;
  int column_warp;

  __device__ __forceinline__ RowPeers(SharedStorage<Traits>& smem, int thread)
      : storage(smem.peers),
        lane(thread % 32),
        row_warp(thread / 32 % Traits::kRowWarps),
        column_warp(thread / 32 / Traits::kRowWarps) {}

  // True in the first warp of the pair.
  __device__ __forceinline__ bool first() const { return column_warp == 0; }

  // values: of each of the thread's rows, the same in a quad.
  template <class Values>
  __device__ __forceinline__ void max(Values& values) const {
    float other[Traits::kRowsPerThread];
    read_other(values, other);
    CUTE_UNROLL
    for (int r = 0; r < Traits::kRowsPerThread; ++r) values[r] = fmaxf(values[r], other[r]);
  }
  // values: each thread's share. The row's sum becomes the share of its first lane.
  template <class Values>
  __device__ __forceinline__ void sum(Values& values) const {
    float other[Traits::kRowsPerThread];
    CUTE_UNROLL
    for (int r = 0; r < Traits::kRowsPerThread; ++r) {
      values[r] = OnlineSoftmax<Traits::kRowsPerThread>::quad_sum(values[r]);
    }
    read_other(values, other);
    CUTE_UNROLL
    for (int r = 0; r < Traits::kRowsPerThread; ++r) {
      values[r] = lane % 4 == 0 ? values[r] + other[r] : 0.0f;
    }
  }

  template <class Pairs>
  __device__ __forceinline__ void exchange(const Pairs& pairs, OperandP<Traits>& p) const {
    std::uint32_t base = cast_smem_ptr_to_uint(storage.p);
    std::uint32_t store = base + tile_row(0) * kRowBytes + column_warp * kWarpBytes + lane % 4 * 4;
    CUTE_UNROLL
    for (int m = 0; m < Traits::kMmaM; ++m) {
      CUTE_UNROLL
      for (int n = 0; n < Traits::kTileN / 8 / 2; ++n) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          int row = m * Traits::kMmaRows + i * 8;
          int bytes = n / 2 * (Traits::kMmaColumns * 2) + n % 2 * 16;
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(store + row * kRowBytes + bytes),
                       "r"(pairs(i, m, n))
                       : "memory");
        }
      }
    }
    wait_for_peer();
    std::uint32_t load = base + (row_warp * 16 + lane % 16) * kRowBytes + lane / 16 * kChunkBytes;
    CUTE_UNROLL
    for (int depth = 0; depth < Traits::kTileN / 16; ++depth) {
      CUTE_UNROLL
      for (int m = 0; m < Traits::kMmaM; ++m) {
        load_matrices(p[depth][m], load + m * Traits::kMmaRows * kRowBytes + depth * 32);
      }
    }
  }

 private:
  __device__ __forceinline__ void wait_for_peer() const {
    asm volatile("bar.sync %0, 64;" ::"r"(kFirstBarrier + row_warp) : "memory");
  }
  // Row r of this thread is row tile_row(0) + r % 2 * 8 + r / 2 * kMmaRows of the tile.
  __device__ __forceinline__ int tile_row(int r) const {
    return row_warp * 16 + lane / 4 + r % 2 * 8 + r / 2 * Traits::kMmaRows;
  }
  template <class Values>
  __device__ __forceinline__ void read_other(const Values& values,
                                             float (&other)[Traits::kRowsPerThread]) const {
    if (lane % 4 == 0) {
      CUTE_UNROLL
      for (int r = 0; r < Traits::kRowsPerThread; ++r) {
        storage.of_row[column_warp][tile_row(r)] = values[r];
      }
    }
    wait_for_peer();
    CUTE_UNROLL
    for (int r = 0; r < Traits::kRowsPerThread; ++r) {
      other[r] = storage.of_row[1 - column_warp][tile_row(r)];
    }
  }
};

}  // namespace preflash::sm80
