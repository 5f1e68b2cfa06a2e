// Online softmax with a lazy reference: it moves, and O is rescaled, only when a row's maximum has
// grown by more than kLazyBits, a factor of 2^kLazyBits. Up to that bound P stays <= 2^kLazyBits,
// exact enough in 16 bits since only its relative rounding matters. Where the maximum itself is
// asked for, the reference follows it closely.
#pragma once

#include "kernels/common/online_softmax.cuh"
#include "kernels/common/row_map.cuh"
#include "kernels/common/running_maxima.cuh"

namespace preflash::sm80 {

// Softmax parameters of a launch.
struct LazyParams {
  float scale_log2;
  float lazy_bits;  // by how many the reference may lie below the maximum
};

template <int kRowsPerThread, Sparsity kSparsity = Sparsity::kDense>
struct LazySoftmax : OnlineSoftmax<kRowsPerThread> {
  // 8 bits: P <= 256, far below float16's 65504 even when a row sums thousands of such terms in
  // float32.
  static constexpr float kLazyBits = 8.0f;

  using Base = OnlineSoftmax<kRowsPerThread>;
  using Base::quad_max;
  using Base::row_max_ref;
  using Base::sum;

  // Running maxima of the item. Each of the four lanes that share rows keeps one row's maximum.
  std::conditional_t<kSparsity == Sparsity::kSkipping, RunningMaxima<1>, NoRunningMaxima>
      maxima_so_far;
  static_assert(kSparsity == Sparsity::kDense || kRowsPerThread <= 4);

  // The row that a lane keeps the maximum of.
  __device__ __forceinline__ static int kept_row(int thread) { return thread % kRowsPerThread; }

  __device__ __forceinline__ static LazyParams params_of(const KernelSegment& segment) {
    bool exact = segment.lse.form == LseForm::kMaxAndSum;
    return {segment.logits.scale_log2, exact ? 0.0f : kLazyBits};
  }

  // Moves the references to where the tile's scores want them, and passes the offsets to weigh().
  // scores: (row, column) view of this thread's fragment. out: (row, column) view of the
  // accumulator, rescaled where the reference moves. peers: the warps that share the rows. Returns
  // false for a skipped tile, whose scores it leaves as they are.
  template <class Scores, class Out, class Peers>
  __device__ __forceinline__ bool refer(Scores& scores, Out& out, const LazyParams& params,
                                        const Peers& peers, float (&offset)[kRowsPerThread]) {
    using namespace cute;
    const float scale_log2 = params.scale_log2;
    static_assert(size<0>(Scores{}) == kRowsPerThread);
    float tile_max[kRowsPerThread];
    float next[kRowsPerThread];
    bool special = false;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      tile_max[r] = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) tile_max[r] = fmaxf(tile_max[r], scores(r, c));
      tile_max[r] = quad_max(tile_max[r]);
    }
    peers.max(tile_max);
    if constexpr (kSparsity == Sparsity::kSkipping) {
      float own[1] = {tile_max[0]};
      CUTE_UNROLL
      for (int r = 1; r < kRowsPerThread; ++r) {
        float of_row = tile_max[r];
        own[0] = r == kept_row(threadIdx.x) ? of_row : own[0];
      }
      if (!__any_sync(0xffffffffu, maxima_so_far.take(own))) return false;
    }
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      // True also for a row's first key: x - (-inf) is +inf. -inf - (-inf) is NaN: false.
      bool moves = (tile_max[r] - row_max_ref[r]) * scale_log2 > params.lazy_bits;
      next[r] = moves ? tile_max[r] : row_max_ref[r];
      offset[r] = Base::scaled_reference(next[r], scale_log2);
      // Tested again for each tile, because the products need the registers.
      special |= moves | Base::is_huge(Base::scaled_reference(row_max_ref[r], scale_log2));
    }
    if (__any_sync(0xffffffffu, special)) move(next, offset, scores, out, scale_log2);
    return true;
  }
  // scores: x on entry, P = 2^((x - reference) * scale) on return.
  template <class Scores>
  __device__ __forceinline__ void weigh(Scores& scores, float scale_log2,
                                        const float (&offset)[kRowsPerThread]) {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), scale_log2, -offset[r]));
        sum[r] += scores(r, c);
      }
    }
  }

  // If the maximum is an output too, the sum is of the weights alone.
  __device__ __forceinline__ RowResult finish(int r, float scale_log2, LseForm form) const {
    RowResult result = Base::finish(r, scale_log2);
    if (form == LseForm::kLogSum) Base::finish_huge(r, scale_log2, result.lse);
    return result;
  }

 private:
  template <class Scores, class Out>
  __device__ __forceinline__ void move(const float (&next)[kRowsPerThread],
                                       float (&offset)[kRowsPerThread], Scores& scores, Out& out,
                                       float scale_log2) {
    using namespace cute;
    bool any_huge = false;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      any_huge |= Base::is_huge(offset[r]) |
                  Base::is_huge(Base::scaled_reference(row_max_ref[r], scale_log2));
    }
    any_huge = __any_sync(0xffffffffu, any_huge);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      // Rounded as in the last tile: an FMA here would round differently.
      float scaled = __fmul_rn(row_max_ref[r], scale_log2);
      float factor = exp2_approx(scaled - offset[r]);
      if (any_huge) factor = Base::change_of_origin(row_max_ref[r], next[r], scale_log2);
      // A row that did not move is multiplied by exactly 1: its result never depends on its
      // neighbours.
      if (next[r] == row_max_ref[r]) factor = 1.0f;
      row_max_ref[r] = next[r];
      sum[r] = __fmul_rn(sum[r], factor);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(out); ++c) out(r, c) *= factor;
    }
    if (any_huge) {
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) Base::center_if_huge(r, scores, offset[r]);
    }
  }
};

}  // namespace preflash::sm80
