// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over the score fragments of one thread,
// in base 2: what its forms share, the references that exponents are taken from and the sums. Any
// reference gives the same quotient; the forms differ in when they move it
// (sm80/lazy_softmax.cuh, sm90/speculative_softmax.cuh).
//
// Exponents are (x - reference) * scale_log2, computed as an FMA against the rounded product of the
// reference. Every tile of a row shares what the rounding took, so it cancels; but beyond 2^24 that
// is more than a factor of two, and P would overflow or vanish. Such rows are centered: their scores
// have the row's running maximum, the center, subtracted before anything else looks at them, which
// costs an operation more, and their reference is 0.
#pragma once

#include <cfloat>

#include <cute/tensor.hpp>

#include "kernels/common/logits.cuh"
#include "preflash/plan.h"

namespace preflash {

// What a row comes to.
struct RowResult {
  float factor;    // normalises O; 0 where nothing was kept
  PartialLse lse;  // base 2
  bool empty;      // no key was kept
};

template <int kRowsPerThread>
struct OnlineSoftmax {
  float reference[kRowsPerThread];  // in units of x, before scale_log2; -inf: nothing kept yet
  float sum[kRowsPerThread];        // this thread's share of the row

  // Of centered rows; 0: not one of them. Volatile so that they stay in local memory: the forms keep
  // a flag that says whether any row of the warp has one, and leave them alone while none has.
  volatile float center[kRowsPerThread];

  __device__ __forceinline__ OnlineSoftmax() { reset(); }
  __device__ __forceinline__ void reset() {
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

  // What a row's exponents are taken from: 0 while the row has kept nothing.
  __device__ static __forceinline__ float scaled_reference(float reference, float scale_log2) {
    return reference == -INFINITY ? 0.0f : __fmul_rn(reference, scale_log2);
  }
  __device__ static __forceinline__ bool is_huge(float scaled_reference) {
    return fabsf(scaled_reference) >= 0x1p24f;
  }

  // What sum and O are to be multiplied by when a row's reference moves to `next`, which is huge;
  // factor: the same if it were not.
  __device__ static __forceinline__ float factor_to_center(float factor, float next,
                                                           float scale_log2) {
    // Beyond 2^24 and what float32 holds of 2^x, nothing is left of the keys before.
    return factor == 0.0f ? 0.0f
                          : factor * exp2_approx(-product_rest(next, scale_log2,
                                                               __fmul_rn(next, scale_log2)));
  }

  // Centers row r, whose center is set, on its maximum so far. tile_max: of its scores.
  template <class Scores, class Out>
  __device__ __forceinline__ void move_center(int r, Scores& scores, Out& out, float tile_max,
                                              float scale_log2) {
    using namespace cute;
    float last = center[r];
    float next = fmaxf(last, tile_max);
    if (next > last) {
      float factor = exp2_approx((last - next) * scale_log2);
      sum[r] *= factor;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(out); ++c) out(r, c) *= factor;
      center[r] = next;
    }
    subtract(r, scores, next);
  }
  template <class Scores>
  __device__ static __forceinline__ void subtract(int r, Scores& scores, float center) {
    using namespace cute;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) scores(r, c) -= center;
  }

  // center: of row r, 0 where it has none.
  __device__ __forceinline__ RowResult finish_row(int r, float scale_log2, float center) const {
    // NOTE: 0 only for a row that kept nothing, since P is about 1 at the reference or larger. So
    // the approximate logarithm and reciprocal meet no small number, and have its last bit.
    float total = quad_sum(sum[r]);
    RowResult result;
    result.empty = total == 0.0f;
    result.factor = result.empty ? 0.0f : reciprocal_approx(total);
    // NOTE: P was taken from the rounded product, so the sum goes on top of that one, not of an
    // FMA.
    float high = scaled_reference(reference[r], scale_log2);
    float rest = 0.0f;
    if (center != 0.0f) {
      // What base 2 overflows still has its order.
      high = fminf(fmaxf(__fmul_rn(center, scale_log2), -FLT_MAX), FLT_MAX);
      rest = shrunk_rest(center, scale_log2, high);
    }
    result.lse.high = result.empty ? -INFINITY : high;
    result.lse.low = result.empty ? 0.0f : rest + log2_approx(total);
    return result;
  }

  // What rounding took from a product.
  __device__ static __forceinline__ float product_rest(float x, float scale_log2, float rounded) {
    return fmaf(x, scale_log2, -rounded);
  }
  // It tells chunks apart whose products round to one number. Beyond 2^30 it is scaled down to what
  // 2^30 leaves, 32 at most, so that the logarithm of the sum keeps its bits beside it; two centers
  // differ by 64 and more even then.
  __device__ static __forceinline__ float shrunk_rest(float center, float scale_log2, float high) {
    float shrink = 0x1p-30f * reciprocal_approx(fabsf(high) * 0x1p-60f);  // 2^30 / |high|
    return product_rest(center, scale_log2, high) * fminf(shrink, 1.0f);
  }

  // The maximum of each row, over the quad that shares it. Four chains a row, all rows side by
  // side: one chain would wait for itself at every step.
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
