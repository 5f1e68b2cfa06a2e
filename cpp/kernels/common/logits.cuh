// From a raw dot product to the number that the softmax sees: scale and soft cap.
//
// The softmax works in base 2 on `x * scale_log2`, so that one FFMA feeds each EX2. Without a soft
// cap x is the raw dot product and scale_log2 = sm_scale * log2(e); with one, x = tanh(sm_scale *
// qk / c) and scale_log2 = c * log2(e).
//
// The tall tiles of fa3 cap by the GPU's own tanh unless asked not to (sm90/soft_cap.cuh).
// Elsewhere tanh has float32's accuracy: a polynomial for logits below kTanhRange caps, where the
// other form would lose bits, and an exponential and a reciprocal for larger ones.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/log2.cuh"
#include "preflash/types.h"

namespace preflash {

// |logit / c| below which tanh is the polynomial.
inline constexpr float kTanhRange = 0.4375f;

// Host-side constants of one launch, derived from sm_scale and soft_cap.
struct LogitsParams {
  float scale_log2 = 1.0f;  // > 0, so that the row maximum may be taken before scaling
  float cap_scale = 1.0f;   // soft cap only: sm_scale / c in units of kTanhRange / 2
  // A maximum over unscaled logits is the scaled one's only for sm_scale > 0, and -inf * 0 is
  // NaN. Q itself is multiplied by this sign, exact in every dtype: -1 or 0 for such scales.
  float q_factor = 1.0f;

  static LogitsParams make(float sm_scale, float soft_cap) {
    if (soft_cap > 0.0f) {
      return {soft_cap * kLog2E, sm_scale / soft_cap * (2.0f / kTanhRange), 1.0f};
    }
    if (sm_scale > 0.0f) return {sm_scale * kLog2E, 1.0f, 1.0f};
    if (sm_scale == 0.0f) return {kLog2E, 1.0f, 0.0f};
    return {-sm_scale * kLog2E, 1.0f, -1.0f};
  }
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Relative error 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh(u * kTanhRange / 2) for |u| < 2: the odd polynomial of degree 7 with the smallest relative
// error, 2e-7, besides the rounding of its last two products.
inline constexpr double kTanhC1 = 2.187499571e-01;
inline constexpr double kTanhC3 = -3.488831744e-03;
inline constexpr double kTanhC5 = 6.634773757e-05;
inline constexpr double kTanhC7 = -1.112600895e-06;

__device__ __forceinline__ float tanh_polynomial(float u) {
  float u2 = u * u;
  float p = fmaf(u2, static_cast<float>(kTanhC7), static_cast<float>(kTanhC5));
  p = fmaf(u2, p, static_cast<float>(kTanhC3));
  p = fmaf(u2, p, static_cast<float>(kTanhC1));
  return u * p;
}
// For every u, inf and NaN too. tanh.approx.f32 has an error of 5e-4, more than a 16-bit output
// hides under a cap of 30 to 50.
__device__ __forceinline__ float tanh_anywhere(float u) {
  float e = exp2_approx(kTanhRange * kLog2E * fabsf(u));
  float t = copysignf(fmaf(-2.0f, reciprocal_approx(1.0f + e), 1.0f), u);
  return fabsf(u) < 2.0f ? tanh_polynomial(u) : t;
}

// All of a tile's scores.
template <Logits kLogits, class Scores>
__device__ __forceinline__ void transform_logits(Scores&& scores, const LogitsParams& params) {
  if constexpr (kLogits == Logits::kSoftCap) {
    CUTE_UNROLL
    for (int i = 0; i < cute::size(scores); ++i) {
      scores(i) = tanh_anywhere(scores(i) * params.cap_scale);
    }
  }
}

}  // namespace preflash
