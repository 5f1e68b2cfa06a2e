// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over the score fragments of one thread,
// in base 2: what its forms share, the references that exponents are taken from and the sums. Any
// reference gives the same quotient; the forms differ in when they move it
// (sm80/lazy_softmax.cuh, sm90/speculative_softmax.cuh).
//
// Exponents are (x - reference) * scale_log2, computed as an FMA against the rounded product of the
// reference: exact to float32 as long as |reference * scale_log2| stays below 2^24 or so, far
// beyond the -2.5e5 of additive masks.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/logits.cuh"

namespace preflash {

template <int kRowsPerThread>
struct OnlineSoftmax {
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

  // The factor that normalises row r, and its base-2 LSE: 0 and -inf where nothing was kept.
  __device__ __forceinline__ float finish(int r, float scale_log2, float* lse) const {
    float total = quad_sum(sum[r]);
    // NOTE: total == 0 only for a row that kept nothing, since P is about 1 at the reference or
    // larger, or whose scaled maximum overflows: -inf and NaN. So the approximate logarithm and
    // reciprocal meet no small number, and have its last bit.
    // NOTE: P was taken from the rounded product, so the sum goes on top of that one, not of an
    // FMA.
    *lse = scaled_reference(reference[r], scale_log2) + log2_approx(total);
    return total == 0.0f ? 0.0f : reciprocal_approx(total);
  }

  // What a row's exponents are taken from: 0 while the row has kept nothing.
  __device__ static __forceinline__ float scaled_reference(float reference, float scale_log2) {
    return reference == -INFINITY ? 0.0f : __fmul_rn(reference, scale_log2);
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
