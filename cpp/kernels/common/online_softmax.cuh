// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over the score fragments of one thread,
// in base 2, with a lazy reference: the exponent's reference point moves, and O is rescaled, only
// when a row's maximum has grown by more than kLazyBits, a factor of 2^kLazyBits. Any reference
// gives the same quotient; up to that bound P stays <= 2^kLazyBits, exact enough in 16 bits since
// only its relative rounding matters.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/logits.cuh"

namespace preflash {

template <int kRowsPerThread>
struct OnlineSoftmax {
  // 8 bits: P <= 256, far below float16's 65504 even when a row sums thousands of such terms in
  // float32.
  static constexpr float kLazyBits = 8.0f;

  float reference[kRowsPerThread];  // in units of x, before scale_log2; -inf: nothing kept yet
  float sum[kRowsPerThread];        // this thread's share of the row

  __device__ __forceinline__ OnlineSoftmax() {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      reference[r] = -INFINITY;
      sum[r] = 0.0f;
    }
  }

  __device__ static __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  }
  __device__ static __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x + __shfl_xor_sync(0xffffffffu, x, 1);
  }

  // What a tile's maxima do to the references: where any row of the warp moved, this thread's rows
  // of O are to be multiplied by `factor`.
  struct Move {
    float factor[kRowsPerThread];  // set only where `any`
    bool any;
  };

  // scores, (row, column) view of this thread's fragment: x on entry, P = 2^((x - reference) *
  // scale) on return. out, (row, column) view of the accumulator, is rescaled where the reference
  // moved.
  template <class Scores, class Out>
  __device__ __forceinline__ void update(Scores& scores, Out& out, float scale_log2) {
    Move move = move_references(scores, scale_log2);
    rescale(out, move);
    exponentiate(scores, scale_log2);
  }

  // The first of update()'s three steps; the other two may come in either order.
  template <class Scores>
  __device__ __forceinline__ Move move_references(const Scores& scores, float scale_log2) {
    static_assert(decltype(cute::size<0>(scores))::value == kRowsPerThread);
    float tile_max[kRowsPerThread];
    maxima(scores, tile_max);
    bool moves[kRowsPerThread];
    bool moved = false;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      // True also for the first kept key of a row: x - (-inf) is +inf. -inf - (-inf) is NaN: false.
      moves[r] = (tile_max[r] - reference[r]) * scale_log2 > kLazyBits;
      moved |= moves[r];
    }
    Move move;
    move.any = __any_sync(0xffffffffu, moved);
    if (!move.any) return move;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      // A row that did not move is multiplied by exactly 1: its result never depends on its
      // neighbours.
      float next = moves[r] ? tile_max[r] : reference[r];
      // NOTE: rounded as the last tile's was: an FMA here would tear the two apart.
      float scaled = __fmul_rn(reference[r], scale_log2);
      move.factor[r] = moves[r] ? exp2_approx(scaled - scaled_reference(next, scale_log2)) : 1.0f;
      reference[r] = next;
      sum[r] *= move.factor[r];
    }
    return move;
  }

  template <class Out>
  __device__ __forceinline__ static void rescale(Out& out, const Move& move) {
    using namespace cute;
    if (!move.any) return;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(out); ++c) out(r, c) *= move.factor[r];
    }
  }

  template <class Scores>
  __device__ __forceinline__ void exponentiate(Scores& scores, float scale_log2) {
    using namespace cute;
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      float offset = scaled_reference(reference[r], scale_log2);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), scale_log2, -offset));
        sum[r] += scores(r, c);
      }
    }
  }

  // The factor that normalises row r, and its base-2 LSE: 0 and -inf where nothing was kept.
  __device__ __forceinline__ float finish(int r, float scale_log2, float* lse) {
    float total = quad_sum(sum[r]);
    // NOTE: total == 0 only for a row that kept nothing: P is 1 at the reference or larger. So the
    // approximate logarithm and reciprocal never meet a number below 1, and have its last bit.
    *lse = total > 0.0f ? fmaf(reference[r], scale_log2, log2_approx(total))
                        : (total == 0.0f ? -INFINITY : total);
    return total == 0.0f ? 0.0f : reciprocal_approx(total);
  }

  // What a row's exponents are taken from: 0 while the row has kept nothing.
  __device__ static __forceinline__ float scaled_reference(float reference, float scale_log2) {
    return reference == -INFINITY ? 0.0f : __fmul_rn(reference, scale_log2);
  }

  // The maximum of each row, over the quad that shares it. Four chains a row, all rows side by side:
  // one chain would wait for itself at every step.
  template <class Scores>
  __device__ static __forceinline__ void maxima(const Scores& scores,
                                                float (&result)[kRowsPerThread]) {
    using namespace cute;
    constexpr int kChains = 4;
    float part[kRowsPerThread][kChains];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < kRowsPerThread; ++r) {
        float& chain = part[r][c % kChains];
        chain = c < kChains ? scores(r, c) : fmaxf(chain, scores(r, c));
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      result[r] = quad_max(fmaxf(fmaxf(part[r][0], part[r][1]), fmaxf(part[r][2], part[r][3])));
    }
  }
};

}  // namespace preflash
