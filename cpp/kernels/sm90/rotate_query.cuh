// RoPE of queries in kernels whose keys arrive rotated (core/staging.h): a consumer warpgroup
// rotates its 64 rows of Q in place, once for each work item. A copy of Q that is rotated before
// the kernel begins takes a read and a write of memory; here Q has arrived anyway.
//
// A thread has four pairs of dimensions and neighbouring rows, so that heads of one token share the
// angles that it makes. The bits are those that the staging pass writes: the same frequencies, the
// same operations, the same rounding.
#pragma once

#include <bit>

#include "kernels/sm90/forward_transform.cuh"

namespace preflash::sm90 {

// All threads of the CTA write the table; whoever reads it waits for the CTA first.
template <class Traits>
__device__ __forceinline__ void fill_query_frequencies(const RotaryFrequencies& frequencies,
                                                       SharedStorage<Traits>& smem) {
  for (int pair = threadIdx.x; pair < Traits::kPairs; pair += Traits::kThreads) {
    smem.rotary.frequency[pair] = frequencies.of_pair[pair];
  }
}

template <class Traits>
struct QueryRotator {
  static constexpr DType kDType = Traits::kVariant.q_dtype;
  static constexpr int kUnits = Traits::kPairs / kLanePairs;  // of one row
  static constexpr int kLanes = std::bit_ceil(unsigned{kUnits});
  static constexpr int kRows = kWarpgroupRows / (kWarpgroupThreads / kLanes);  // of a thread
  static_assert(kRows == 4 || kRows % 8 == 0, "SwizzledColumn takes rows from such a multiple on");

  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  const ItemState& state;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup

  __device__ __forceinline__ void run(int stage) const {
    const int half = params.head_dim_qk / 2;
    const int pair = thread % kLanes * kLanePairs;
    if (pair >= half) return;
    const int first_row = warpgroup * kWarpgroupRows + thread / kLanes * kRows;
    const int num_rows = min(state.num_rows - first_row, kRows);
    auto* tile = reinterpret_cast<unsigned char*>(smem.q) + stage * Traits::kBytesQ;
    const SwizzledColumn<Traits::kTileM> low(tile, first_row, pair);
    const SwizzledColumn<Traits::kTileM> high(tile, first_row, half + pair);
    const Frequencies frequency = Frequencies::load(smem.rotary.frequency + pair);
    const int first_position = state.request.kv_len - state.request.qo_len;
    const int first_packed = state.item.row_begin + first_row;
    int token = -1;
    Rotation by[kLanePairs];
    // NOTE: one row at a time, whose angles are four chains already. Two or four of them side by
    // side are more code to fetch for one use, and no faster.
#pragma unroll 1
    for (int i = 0; i < num_rows; ++i) {
      const int of_row = unpack_row(params, first_packed + i).token;
      unsigned char* low_row = low.at(i);
      unsigned char* high_row = high.at(i);
      FourFloats low_floats = FourFloats::of<kDType>(*reinterpret_cast<const uint2*>(low_row));
      FourFloats high_floats = FourFloats::of<kDType>(*reinterpret_cast<const uint2*>(high_row));
      if (of_row != token) {
        token = of_row;
        CUTE_UNROLL
        for (int p = 0; p < kLanePairs; ++p) {
          by[p] = rotation_by(turns_at(first_position + token, frequency.of_pair[p]));
        }
      }
      CUTE_UNROLL
      for (int p = 0; p < 2; ++p) {
        rotate(low_floats.pair[p].x, high_floats.pair[p].x, by[2 * p]);
        rotate(low_floats.pair[p].y, high_floats.pair[p].y, by[2 * p + 1]);
      }
      low_floats.template store<kDType>(low_row);
      high_floats.template store<kDType>(high_row);
    }
  }

 private:
  struct alignas(16) Frequencies {
    std::uint64_t of_pair[kLanePairs];

    __device__ __forceinline__ static Frequencies load(const std::uint64_t* from) {
      return *reinterpret_cast<const Frequencies*>(from);
    }
  };
};

}  // namespace preflash::sm90
