// Online softmax (Milakov and Gimelshein, arXiv 1805.02867) over the score fragments of one thread,
// in base 2: what its forms share, the references that exponents are taken from and the sums. Any
// reference gives the same quotient; the forms differ in when they move it
// (sm80/lazy_softmax.cuh, sm90/speculative_softmax.cuh).
//
// Exponents are counted from a row's origin: its reference times scale_log2, rounded, so that one
// FMA makes each. Every tile of a row shares what the rounding took, so it cancels; but from 2^24
// on that is more than a factor of two, and further on P overflows or vanishes. sm80 counts the
// exponents of such a row, a huge one, from the exact product, (x - reference) * scale_log2, which
// is an operation more; sm90 makes rows NaN before they can be wrong.
#pragma once

#include <cfloat>
#include <cute/tensor.hpp>

#include "kernels/common/logits.cuh"
#include "kernels/common/sink.cuh"
#include "preflash/params.h"

namespace preflash {

// Result of a row.
struct RowResult {
  float factor;    // normalises O; 0 where there was no key
  PartialLse lse;  // base 2
  bool empty;      // the row has no key
};

// Returns the row with one more logit, in base 2, whose key has no value. A row without keys keeps
// its factor and stays empty.
__device__ __forceinline__ RowResult add_logit(RowResult result, float logit) {
  if (result.empty) {
    result.lse = {.high = 0.0f, .low = logit};
    return result;
  }
  // The larger of the two takes the other one in: 2^larger * (1 + ratio), ratio <= 1.
  float difference = (result.lse.high - logit) + result.lse.low;
  float ratio = exp2_approx(-fabsf(difference));
  bool logit_is_larger = difference < 0.0f;
  result.factor *= (logit_is_larger ? ratio : 1.0f) * reciprocal_approx(1.0f + ratio);
  if (logit_is_larger) result.lse = {.high = logit, .low = 0.0f};
  result.lse.low += log2_approx(1.0f + ratio);
  return result;
}

// Adds the segment's keyless logit to a row. With LseForm::kMaxAndSum the LSE stays that of the
// keys.
template <class Segment>
__device__ __forceinline__ void add_keyless(RowResult& result, const Segment& segment, int head) {
  PartialLse of_keys = result.lse;
  result = add_logit(result, sink(segment.extras, head));
  if (segment.lse.form == LseForm::kMaxAndSum) result.lse = of_keys;
}

// Writes a row's LSE at `place` in the form of `tensor`: a log-sum, or a maximum and a sum.
__device__ __forceinline__ void store_row_lse(const LseTensor& tensor, float* place,
                                              const PartialLse& lse) {
  if (tensor.form == LseForm::kLogSum) {
    *place = (lse.high + lse.low) * tensor.scale;
  } else {
    place[0] = lse.low == -INFINITY ? -INFINITY : lse.high * tensor.scale;
    place[1] = exp2_approx(lse.low);
  }
}

template <int kRowsPerThread>
struct OnlineSoftmax {
  float row_max_ref[kRowsPerThread];  // in units of x, before scale_log2; -inf: no key yet
  float sum[kRowsPerThread];          // this thread's share of the row

  __device__ __forceinline__ OnlineSoftmax() {
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) {
      row_max_ref[r] = -INFINITY;
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

  __device__ __forceinline__ RowResult finish(int r, float scale_log2) const {
    return result_of(quad_sum(sum[r]), scaled_reference(row_max_ref[r], scale_log2));
  }
  // total: the row's sum, counted from 2^origin.
  __device__ static __forceinline__ RowResult result_of(float total, float origin) {
    // The total is 0 only for a row without keys, because P is about 1 at the reference or larger.
    // So the approximate logarithm and reciprocal get no small number, and are accurate to the last
    // bit.
    RowResult result;
    result.empty = total == 0.0f;
    result.factor = result.empty ? 0.0f : reciprocal_approx(total);
    result.lse.high = origin;
    result.lse.low = log2_approx(total);
    return result;
  }
  // Completes the LSE from finish() for a row that may be huge.
  __device__ __forceinline__ void finish_huge(int r, float scale_log2, PartialLse& lse) const {
    if (!is_huge(lse.high)) return;
    lse.high = fminf(fmaxf(lse.high, -FLT_MAX), FLT_MAX);  // what base 2 overflows has its order
    lse.low += shrunk_rest(row_max_ref[r], scale_log2, lse.high);
  }

  // The origin of a row that is not huge: 0 while the row has no key.
  __device__ static __forceinline__ float scaled_reference(float row_max_ref, float scale_log2) {
    return row_max_ref == -INFINITY ? 0.0f : __fmul_rn(row_max_ref, scale_log2);
  }
  __device__ static __forceinline__ bool is_huge(float scaled_reference) {
    return fabsf(scaled_reference) >= 0x1p24f;
  }

  // Returns the factor that converts a sum counted from reference `from` to one from `to`.
  __device__ static __forceinline__ float change_of_origin(float from, float to, float scale_log2) {
    return from == -INFINITY
               ? 0.0f
               : exp2_approx(static_cast<float>(origin(from, scale_log2) - origin(to, scale_log2)));
  }

  // Puts the zero of a huge row's scores at its reference, so that its offset is 0; a row that is
  // not huge stays as it is. offset: what the exponents' FMA subtracts.
  template <class Scores>
  __device__ __forceinline__ void center_if_huge(int r, Scores& scores, float& offset) const {
    using namespace cute;
    float zero = is_huge(offset) ? row_max_ref[r] : 0.0f;
    offset = is_huge(offset) ? 0.0f : offset;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) scores(r, c) = __fsub_rn(scores(r, c), zero);
  }

  // The maximum of each row, over the quad that shares it.
  template <class Scores>
  __device__ static __forceinline__ void maxima(const Scores& scores,
                                                float (&result)[kRowsPerThread]) {
    thread_maxima(scores, result);
    CUTE_UNROLL
    for (int r = 0; r < kRowsPerThread; ++r) result[r] = quad_max(result[r]);
  }
  // The maximum of this thread's share of each row. Four chains a row, all rows side by side: one
  // chain would wait for itself at every step.
  template <class Scores>
  __device__ static __forceinline__ void thread_maxima(const Scores& scores,
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
      result[r] = fmaxf(fmaxf(part[r][0], part[r][1]), fmaxf(part[r][2], part[r][3]));
    }
  }

 private:
  // Exact: two floats' product fits a double.
  __device__ static __forceinline__ double origin(float row_max_ref, float scale_log2) {
    float scaled = __fmul_rn(row_max_ref, scale_log2);
    return is_huge(scaled) ? static_cast<double>(row_max_ref) * scale_log2 : scaled;
  }

  // Returns the rounding error of a huge reference's product, which distinguishes chunks whose
  // products round to one number. Beyond 2^30 it is scaled down to the error at 2^30, 64 at most,
  // so that the logarithm of the sum keeps its bits when added; two references differ by 64 and
  // more even then.
  __device__ static __forceinline__ float shrunk_rest(float row_max_ref, float scale_log2,
                                                      float high) {
    float shrink = 0x1p-30f * reciprocal_approx(fabsf(high) * 0x1p-60f);  // 2^30 / |high|
    return fmaf(row_max_ref, scale_log2, -high) * fminf(shrink, 1.0f);
  }
};

}  // namespace preflash
