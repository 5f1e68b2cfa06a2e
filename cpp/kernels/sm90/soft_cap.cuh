// The soft cap, c * tanh(logit / c), of S where it was accumulated. Soft caps seldom bend a logit
// by much, so the tanh is a polynomial on the FMA pipes (common/logits.cuh), elsewhere exp and a
// reciprocal.
//
// The polynomial takes raw dot products: the scale is in its coefficients, so that no copy of S in
// other registers comes between. And it tells itself whether it holds: its inner factor grows with
// s^2, and leaves (-inf, -2] where s leaves the polynomial's range.
#pragma once

#include <cmath>
#include <cstdint>
#include <cute/tensor.hpp>

#include "kernels/common/logits.cuh"

namespace preflash::sm90 {

// unit * tanh(logit / c) of a raw dot product s, by tanh_polynomial() in other units; made on the
// host. sm_scale: not negative, since Q has its sign.
struct SoftCapCurve {
  // The inner factor's value at 0 that makes it -2 at |u| = 2.
  static constexpr double kInner = -2.0 / (1.0 + 4.0 * kTanhC7 / kTanhC5);
  // The bits that it has while it is <= -2. A NaN that an operation has made lacks the sign.
  static constexpr std::uint32_t kInRange = 0xc0000000u;
  // `small` lies above every |s| that the inner factor or `test` may take for small, however they
  // round: what becomes of a score does not depend on whether others beside it are large.
  static constexpr double kSlack = 1.0 + 0x1p-19;

  float c1, c3, c5, c7;
  float exponent;  // of |s|: 2 |logit| / c in base 2
  float small;     // |s| below which anywhere() takes the polynomial
  float unit;
  float test;      // of s: u; NaN where no score may count as small
  float prescale;  // of s: not 1 where powers of the scale would leave the range of float32

  static SoftCapCurve make(float sm_scale, float soft_cap) {
    const double scale = static_cast<double>(sm_scale) / soft_cap * (2.0 / kTanhRange);
    const bool direct = scale > 1e-4 && scale < 1e4 && soft_cap > 1e-9f;
    const double u = direct ? scale : 1.0;
    const double unit = -kInner / (kTanhC5 * std::pow(u, 5));
    return {.c1 = static_cast<float>(kTanhC1 * unit * u),
            .c3 = static_cast<float>(kTanhC3 * unit * std::pow(u, 3)),
            .c5 = static_cast<float>(kInner),
            .c7 = static_cast<float>(-kTanhC7 * unit * std::pow(u, 7)),
            .exponent = static_cast<float>(kTanhRange * kLog2E * u),
            .small = static_cast<float>(kSlack * 2.0 / u),
            .unit = static_cast<float>(unit),
            .test = direct ? static_cast<float>(u) : NAN,
            .prescale = direct ? 1.0f : static_cast<float>(scale)};
  }

  __device__ __forceinline__ bool may_be_small() const { return prescale == 1.0f; }

  // bits: keeps kInRange while the polynomial holds.
  __device__ __forceinline__ float polynomial(float s, std::uint32_t& bits) const {
    float s2 = s * s;
    float inner = fmaf(s2, c7, c5);
    bits &= __float_as_uint(inner);
    float p = fmaf(-s2, inner, c3);
    p = fmaf(s2, p, c1);
    return s * p;
  }
  // For every s, inf and NaN too. tanh.approx.f32 has an error of 5e-4, more than a 16-bit output
  // hides under a cap of 30 to 50.
  __device__ __forceinline__ float anywhere(float s, std::uint32_t& bits) const {
    float e = exp2_approx(exponent * fabsf(s));
    float t = copysignf(fmaf(-2.0f * unit, reciprocal_approx(1.0f + e), unit), s);
    float p = polynomial(s, bits);
    return fabsf(s) < small ? p : t;
  }
};

// Of kernels with a soft cap.
template <class Segment>
struct CappedSegment : Segment {
  SoftCapCurve cap;

  // The launch's scale, which the softmax continues with, becomes that of the curve.
  void set_cap() {
    cap = SoftCapCurve::make(std::abs(this->sm_scale), this->soft_cap);
    this->logits.q_factor = this->sm_scale < 0.0f ? -1.0f : 1.0f;
    this->logits.scale_log2 = static_cast<float>(this->soft_cap * double{kLog2E} / cap.unit);
    this->x_per_logit = kLog2E / this->logits.scale_log2;
  }
};

// Caps a tile's scores. scores: (row, column) view of a whole accumulator.
struct SoftCap {
  const SoftCapCurve& curve;
  std::uint32_t bits = SoftCapCurve::kInRange;

  // Whether what make_small() was given was small, and all that make_large() was.
  __device__ __forceinline__ bool were_small() const {
    return curve.may_be_small() && bits >= SoftCapCurve::kInRange;
  }
  template <class Scores>
  __device__ __forceinline__ void make_small(Scores&& scores, ColumnSpan span) {
    using namespace cute;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      if (!span.holds(c)) continue;
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) scores(r, c) = curve.polynomial(scores(r, c), bits);
    }
  }
  template <class Scores>
  __device__ __forceinline__ void make_large(Scores&& scores) {
    using namespace cute;
    constexpr int kPart = 8;
    if (!curve.may_be_small()) {
      CUTE_UNROLL
      for (int i = 0; i < size(scores); ++i) scores(i) *= curve.prescale;
    }
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) {
      // Keeps the compiler from computing more of them side by side than it has registers for.
      if (i % kPart == 0) __syncwarp();
      scores(i) = curve.anywhere(scores(i), bits);
    }
  }
  // Finds out first which of both the warp's scores are.
  template <class Scores>
  __device__ __forceinline__ void make(Scores&& scores) {
    using namespace cute;
    // Set in floats from 2 on, inf and NaN among them, and in no smaller one.
    constexpr std::uint32_t kFrom2 = 0x40000000u;
    std::uint32_t u = 0;
    CUTE_UNROLL
    for (int i = 0; i < size(scores); ++i) u |= __float_as_uint(scores(i) * curve.test);
    if (__any_sync(0xffffffffu, (u & kFrom2) != 0)) {
      make_large(scores);
    } else {
      make_small(scores, {0, size<1>(scores)});
    }
  }
};

// How many tiles one behind the other had large logits, up to the number from which on the next is
// expected to have some, too: where logits are large at all, that is. Of a warpgroup.
struct LargeTiles {
  static constexpr int kExpected = 2;
  int number = 0;

  __device__ __forceinline__ bool expected() const { return number == kExpected; }
  __device__ __forceinline__ void count(bool large) {
    number = large ? min(number + 1, kExpected) : 0;
  }
  template <class Segment>
  __device__ __forceinline__ void begin(const Segment& segment) {
    if (!segment.cap.may_be_small()) number = kExpected;
  }
};
// Of kernels that do not ask.
struct NoLargeTiles {
  template <class Segment>
  __device__ __forceinline__ static void begin(const Segment&) {}
};

}  // namespace preflash::sm90
