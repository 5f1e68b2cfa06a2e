// From a raw dot product to the number that the softmax sees: scale and soft cap.
//
// The softmax works in base 2 on `x * scale_log2`, so that one FFMA feeds each EX2. Without a soft
// cap x is the raw dot product and scale_log2 = sm_scale * log2(e); with one, x = tanh(sm_scale *
// qk / c) and scale_log2 = c * log2(e).
#pragma once

#include <cute/tensor.hpp>

#include "preflash/types.h"

namespace preflash {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// Host-side constants of one launch, derived from sm_scale and soft_cap.
struct LogitsParams {
  float scale_log2 = 1.0f;  // > 0, so that the row maximum may be taken before scaling
  float cap_scale = 1.0f;   // soft cap only: sm_scale / c
  // NOTE: a maximum over unscaled logits is the scaled one's only for sm_scale > 0, and -inf * 0 is
  // NaN. Q itself is multiplied by this sign, exact in every dtype: -1 or 0 for such scales.
  float q_factor = 1.0f;

  static LogitsParams make(Logits logits, float sm_scale, float soft_cap) {
    if (logits == Logits::kSoftCap) return {soft_cap * kLog2E, sm_scale / soft_cap, 1.0f};
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

// tanh to a few float32 roundings, relative: two MUFU operations, and for small x, where 1 - e
// cancels and a large cap would blow the difference up, the series. tanh.approx.f32 has 5e-4, more
// than a 16-bit output hides under a cap of 30 to 50.
__device__ __forceinline__ float fast_tanh(float x) {
  float e = exp2_approx(-2.0f * kLog2E * fabsf(x));
  float t = copysignf(__fdividef(1.0f - e, 1.0f + e), x);
  float x2 = x * x;
  // x - x^3/3 + 2x^5/15 - 17x^7/315 + 62x^9/2835: below 1e-7 up to 0.25
  float series = fmaf(x2, 62.0f / 2835.0f, -17.0f / 315.0f);
  series = fmaf(x2, series, 2.0f / 15.0f);
  series = fmaf(x2, series, -1.0f / 3.0f);
  series = fmaf(x * x2, series, x);
  return fabsf(x) < 0.25f ? series : t;
}

template <Logits kLogits, class Fragment>
__device__ __forceinline__ void transform_logits(Fragment& scores, const LogitsParams& params) {
  if constexpr (kLogits == Logits::kSoftCap) {
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) scores(i) = fast_tanh(scores(i) * params.cap_scale);
  }
}

}  // namespace preflash
