// The soft cap, c * tanh(logit / c), of raw dot products s. Soft caps seldom bend a logit by much,
// so near 0 tanh is a polynomial, s * w(s^2); elsewhere it takes exp and a reciprocal, since
// tanh.approx.f32 has an error of 5e-4, more than a 16-bit output hides under a cap of 30 to 50.
//
// Where a tile needs a mask, and in an item's first tile, S is replaced by what mask, reference and
// softmax then take for scores (cap_all). In all other tiles the cap is a part of the softmax's FMA
// (capped_tile.cuh).
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "kernels/common/logits.cuh"
#include "preflash/params.h"

namespace preflash::sm90 {

// log2(e) * c * tanh(logit / c) of a raw dot product s: near 0 and in the middle polynomials of
// degree 3 and 5, as far as they are off by kError. Made on the host, from tanh(x) / x at the
// Chebyshev nodes of x^2. sm_scale: not negative, since Q has its sign.
struct SoftCapCurve {
  // Of a logit: a quarter of what rounding to float16 may change its weight by. The errors are
  // c * x^5 / 60 of degree 3 and c * x^7 / 593 of degree 5. Where c is so large that the middle's
  // range would be of no use, float32's dot products are off by more.
  static constexpr double kError = 1e-4;
  // As a part of c, where a launch returns the row maxima and sums themselves: the float32
  // roundings of tanh are 3e-7.
  static constexpr double kStatisticsError = 1e-7;
  static constexpr double kWidestNear = 0.3;
  static constexpr double kNarrowestMiddle = 0.3;
  static constexpr double kWidestMiddle = 0.45;

  float near1, near3;
  float middle1, middle3, middle5;
  float near_end, middle_end;  // s^2
  float far_exponent;          // of s: 2 logit / c in base 2
  float far_unit;              // log2(e) * c

  static SoftCapCurve make(float sm_scale, float soft_cap, LseForm form) {
    const double cap = soft_cap;
    const bool statistics = form == LseForm::kMaxAndSum;
    const double error = statistics ? kStatisticsError : kError / cap;  // of tanh
    const double x_per_s = sm_scale / cap;
    const double slope = sm_scale * double{kLog2E};
    const double near = std::clamp(std::pow(60.0 * error, 1.0 / 5), 1e-3, kWidestNear);
    const double middle = std::clamp(std::pow(593.0 * error, 1.0 / 7),
                                     statistics ? near : kNarrowestMiddle, kWidestMiddle);
    SoftCapCurve curve;
    double w[3];
    interpolate<2>(near * near, w);
    curve.near1 = static_cast<float>(slope * w[0]);
    curve.near3 = finite(slope * w[1] * std::pow(x_per_s, 2));
    curve.near_end = end_of_range(near / x_per_s);
    interpolate<3>(middle * middle, w);
    curve.middle1 = static_cast<float>(slope * w[0]);
    curve.middle3 = finite(slope * w[1] * std::pow(x_per_s, 2));
    curve.middle5 = finite(slope * w[2] * std::pow(x_per_s, 4));
    curve.middle_end = end_of_range(middle / x_per_s);
    curve.far_exponent = static_cast<float>(2.0 * kLog2E * x_per_s);
    curve.far_unit = static_cast<float>(cap * kLog2E);
    return curve;
  }

  // Each form, less `origin`. far: for every s, inf and NaN too.
  __device__ __forceinline__ float near(float s, float s2, float origin) const {
    return fmaf(s, fmaf(s2, near3, near1), -origin);
  }
  __device__ __forceinline__ float middle(float s, float s2, float origin) const {
    return fmaf(s, fmaf(s2, fmaf(s2, middle5, middle3), middle1), -origin);
  }
  __device__ __forceinline__ float far(float s, float origin) const {
    // tanh(x) = 1 - 2 / (1 + exp(2 x)), of either sign
    float e = exp2_approx(far_exponent * s);
    return fmaf(-2.0f * far_unit, reciprocal_approx(1.0f + e), far_unit - origin);
  }
  __device__ __forceinline__ float anywhere(float s) const {
    float s2 = s * s;
    float by_near = near(s, s2, 0.0f), by_far = far(s, 0.0f);
    return s2 <= near_end ? by_near : by_far;
  }

  // Of a whole tile, in place. What becomes of a score does not depend on those beside it.
  template <class Scores>
  __device__ __forceinline__ void cap_all(Scores&& scores) const {
    using namespace cute;
    std::uint32_t top = 0;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); i += 2) {
      top = __vimax3_u32(top, __float_as_uint(scores(i) * scores(i)),
                         __float_as_uint(scores(i + 1) * scores(i + 1)));
    }
    if (__any_sync(0xffffffffu, top > __float_as_uint(near_end))) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) {
        scores(i) = anywhere(scores(i));
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) {
        scores(i) *= fmaf(scores(i) * scores(i), near3, near1);
      }
    }
  }

 private:
  static double tanh_by_x(double square) {
    const double x = std::sqrt(square);
    return std::tanh(x) / x;
  }
  // The polynomial in x^2 that meets tanh(x) / x at so many nodes in [0, end].
  template <int kNodes>
  static void interpolate(double end, double (&coefficients)[3]) {
    constexpr double kPi = 3.14159265358979323846;
    double node[kNodes], difference[kNodes];
    for (int i = 0; i < kNodes; ++i) {
      node[i] = end / 2 * (1.0 + std::cos((2 * i + 1) * kPi / (2 * kNodes)));
      difference[i] = tanh_by_x(node[i]);
    }
    for (int order = 1; order < kNodes; ++order) {
      for (int i = kNodes - 1; i >= order; --i) {
        difference[i] = (difference[i] - difference[i - 1]) / (node[i] - node[i - order]);
      }
    }
    std::fill(std::begin(coefficients), std::end(coefficients), 0.0);
    for (int i = kNodes - 1; i >= 0; --i) {  // coefficients = difference + (x^2 - node) * them
      for (int power = kNodes - 1; power >= 0; --power) {
        coefficients[power] =
            (power > 0 ? coefficients[power - 1] : difference[i]) - node[i] * coefficients[power];
      }
    }
  }
  // NOTE: a coefficient beyond float32 is that of a range without an s but 0.
  static float finite(double x) { return std::abs(x) < FLT_MAX ? static_cast<float>(x) : 0.0f; }
  static float end_of_range(double s) {
    const double square = s * s;
    return square < FLT_MIN ? 0.0f : static_cast<float>(std::min<double>(square, FLT_MAX));
  }
};

// Of kernels with a soft cap. Scores are exponents in base 2 once they are capped.
template <class Segment>
struct CappedSegment : Segment {
  SoftCapCurve cap;

  void set_cap() {
    cap = SoftCapCurve::make(std::abs(this->sm_scale), this->soft_cap, this->lse.form);
    this->logits.q_factor = this->sm_scale < 0.0f ? -1.0f : 1.0f;
    this->logits.scale_log2 = 1.0f;
    this->x_per_logit = kLog2E;
  }
};

}  // namespace preflash::sm90
