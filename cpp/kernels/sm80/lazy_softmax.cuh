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
  using Base::center;
  using Base::quad_max;
  using Base::reference;
  using Base::sum;

  bool centered = false;  // whether any row of the warp is

  // scores, (row, column) view of this thread's fragment: x on entry, P = 2^((x - reference) *
  // scale) on return. out, (row, column) view of the accumulator, is rescaled where the reference
  // moved.
  template <class Scores, class Out>
  __device__ __forceinline__ void update(Scores& scores, Out& out, float scale_log2) {
    using namespace cute;
    static_assert(size<0>(Scores{}) == kRowsPerThread);
    if (centered) move_centers(scores, out, scale_log2);
    float scaled_reference[kRowsPerThread];
    float correction[kRowsPerThread];
    bool moved = false;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float tile_max = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) tile_max = fmaxf(tile_max, scores(r, c));
      tile_max = quad_max(tile_max);
      // True also for the first kept key of a row: x - (-inf) is +inf. -inf - (-inf) is NaN: false.
      bool moves = (tile_max - reference[r]) * scale_log2 > kLazyBits;
      float next = moves ? tile_max : reference[r];
      scaled_reference[r] = next == -INFINITY ? 0.0f : __fmul_rn(next, scale_log2);
      // NOTE: rounded as the last tile's was: an FMA here would tear the two apart.
      float scaled = __fmul_rn(reference[r], scale_log2);
      correction[r] = moves ? exp2_approx(scaled - scaled_reference[r]) : 1.0f;
      reference[r] = next;
      moved |= moves;
    }
    // A row that did not move is multiplied by exactly 1: its result never depends on its
    // neighbours.
    if (__any_sync(0xffffffffu, moved)) {
      center_huge_rows(scores, scaled_reference, correction, scale_log2);
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) {
        sum[r] *= correction[r];
        CUTE_UNROLL
        for (int c = 0; c < size<1>(out); ++c) out(r, c) *= correction[r];
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), scale_log2, -scaled_reference[r]));
        sum[r] += scores(r, c);
      }
    }
  }

  __device__ __forceinline__ RowResult finish(int r, float scale_log2) const {
    return this->finish_row(r, scale_log2, centered ? center[r] : 0.0f);
  }

 private:
  template <class Scores, class Out>
  __device__ __forceinline__ void move_centers(Scores& scores, Out& out, float scale_log2) {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float tile_max = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) tile_max = fmaxf(tile_max, scores(r, c));
      tile_max = quad_max(tile_max);
      if (center[r] != 0.0f) this->move_center(r, scores, out, tile_max, scale_log2);
    }
  }

  // Rows whose reference has just become huge.
  template <class Scores>
  __device__ __forceinline__ void center_huge_rows(Scores& scores,
                                                   float (&scaled_reference)[kRowsPerThread],
                                                   float (&correction)[kRowsPerThread],
                                                   float scale_log2) {
    bool huge = false;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) huge |= Base::is_huge(scaled_reference[r]);
    if (!__any_sync(0xffffffffu, huge)) return;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      if (!centered) center[r] = 0.0f;
      if (!Base::is_huge(scaled_reference[r])) continue;
      correction[r] = Base::factor_to_center(correction[r], reference[r], scale_log2);
      center[r] = reference[r];
      Base::subtract(r, scores, reference[r]);
      reference[r] = scaled_reference[r] = 0.0f;
    }
    centered = true;
  }
};

}  // namespace preflash::sm80
