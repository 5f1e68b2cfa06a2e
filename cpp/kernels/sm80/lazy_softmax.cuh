// Online softmax with a lazy reference: it moves, and O is rescaled, only when a row's maximum has
// grown by more than kLazyBits, a factor of 2^kLazyBits. Up to that bound P stays <= 2^kLazyBits,
// exact enough in 16 bits since only its relative rounding matters.
#pragma once

#include "kernels/common/online_softmax.cuh"

namespace preflash::sm80 {

template <int kRowsPerThread>
struct LazySoftmax : OnlineSoftmax<kRowsPerThread> {
  // 8 bits: P <= 256, far below float16's 65504 even when a row sums thousands of such terms in
  // float32.
  static constexpr float kLazyBits = 8.0f;

  using Base = OnlineSoftmax<kRowsPerThread>;
  using Base::center_if_huge;
  using Base::change_of_origin;
  using Base::is_huge;
  using Base::quad_max;
  using Base::reference;
  using Base::scaled_reference;
  using Base::sum;

  // scores, (row, column) view of this thread's fragment: x on entry, P = 2^((x - reference) *
  // scale) on return. out, (row, column) view of the accumulator, is rescaled where the reference
  // moved.
  template <class Scores, class Out>
  __device__ __forceinline__ void update(Scores& scores, Out& out, float scale_log2) {
    using namespace cute;
    static_assert(size<0>(Scores{}) == kRowsPerThread);
    float offset[kRowsPerThread];
    float last[kRowsPerThread];
    bool moves[kRowsPerThread];
    bool any = false;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float tile_max = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) tile_max = fmaxf(tile_max, scores(r, c));
      tile_max = quad_max(tile_max);
      // True also for the first kept key of a row: x - (-inf) is +inf. -inf - (-inf) is NaN: false.
      moves[r] = (tile_max - reference[r]) * scale_log2 > kLazyBits;
      last[r] = reference[r];
      reference[r] = moves[r] ? tile_max : last[r];
      offset[r] = scaled_reference(reference[r], scale_log2);
      any |= moves[r] || is_huge(offset[r]);
    }
    // A row that did not move is multiplied by exactly 1: its result never depends on its
    // neighbours.
    if (__any_sync(0xffffffffu, any)) {
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) {
        float factor = moves[r] ? change_of_origin(last[r], reference[r], scale_log2) : 1.0f;
        sum[r] *= factor;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(out); ++c) out(r, c) *= factor;
        center_if_huge(r, scores, offset[r]);
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), scale_log2, -offset[r]));
        sum[r] += scores(r, c);
      }
    }
  }
};

}  // namespace preflash::sm80
