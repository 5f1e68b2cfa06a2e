// A tile under a soft cap whose scores neither lack a mask nor have been capped: its exponents are
// s * w(s^2) - origin where without a cap they are s * scale - origin. Two operations more for each
// score, near 0, and half a one to find out whether that holds.
//
// A warp takes a tile for what those before were, and computes it once more by a wider form where a
// score is beyond the range: S is still there, as for a reference that moves.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/soft_cap.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// The forms of SoftCapCurve.
enum class CapRange { kNear, kMiddle, kFar };

// Of kernels without a soft cap.
struct NoCapRange {};

// As SpeculativeSoftmax takes it. range: what the warp's tiles before ask for, in this item.
// NOTE: rows behind the request's last one hold another's: they may not change what becomes of a
// row.
template <class Traits, class Scores>
struct CappedTile {
  static constexpr int kRows = 2;

  const Scores& scores;  // (row, column) view of a whole accumulator
  ScoreCoordinates<Traits> at;
  const SoftCapCurve& curve;
  CapRange& range;
  std::uint32_t top[kRows];  // the largest s^2, as bits, whose order is that of positive floats

  // p: 16-bit, in the scores' storage order. origin: of the rows' exponents.
  template <class P>
  __device__ __forceinline__ void exponentiate(const float (&origin)[kRows], P& p,
                                               float (&tile_sum)[kRows]) {
    if (range == CapRange::kNear) {
      exponentiate_by(origin, p, tile_sum,
                      [&](float s, float s2, float from) { return curve.near(s, s2, from); });
    } else if (range == CapRange::kMiddle) {
      exponentiate_by(origin, p, tile_sum,
                      [&](float s, float s2, float from) { return curve.middle(s, s2, from); });
    } else {
      exponentiate_by(origin, p, tile_sum,
                      [&](float s, float, float from) { return curve.far(s, from); });
    }
  }

  // Whether this thread has met a score beyond the range. NOTE: a NaN is.
  __device__ __forceinline__ bool left_range() const {
    if (range == CapRange::kFar) return false;
    return is_beyond(0, range) || is_beyond(1, range);
  }
  // Takes a wider range where one of the request's scores is beyond this one, and returns whether
  // that is so.
  __device__ __forceinline__ bool widen_range() {
    CapRange needed = needed_range();
    if (needed <= range) return false;
    range = needed;
    return true;
  }
  // A tile beyond the middle is an exception, unless the next one is, too. The range stays at the
  // middle until the item's end: to look for tiles near 0 costs as much as they save.
  __device__ __forceinline__ void expect_next() const {
    if (range == CapRange::kFar && needed_range() != CapRange::kFar) range = CapRange::kMiddle;
  }

  // Of each row.
  __device__ __forceinline__ void maxima(float (&result)[kRows]) const {
    SpeculativeSoftmax::maxima(scores, NoShift{}, result);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) result[r] = curve.anywhere(result[r]);
  }

 private:
  __device__ __forceinline__ bool is_beyond(int r, CapRange range) const {
    return top[r] > __float_as_uint(range == CapRange::kNear ? curve.near_end : curve.middle_end);
  }
  __device__ __forceinline__ CapRange needed_range() const {
    bool near = false, middle = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (at.row(r) >= at.state.num_rows) continue;
      near |= is_beyond(r, CapRange::kNear);
      middle |= is_beyond(r, CapRange::kMiddle);
    }
    if (!__any_sync(0xffffffffu, near)) return CapRange::kNear;
    return __any_sync(0xffffffffu, middle) ? CapRange::kFar : CapRange::kMiddle;
  }

  // NOTE: volatile keeps the forms apart. What they share would be computed in front of the
  // branches between them, for all scores, in registers that there are not.
  __device__ __forceinline__ static float square(float s) {
    float square;
    asm volatile("mul.f32 %0, %1, %1;" : "=f"(square) : "f"(s));
    return square;
  }
  template <class P, class Exponent>
  __device__ __forceinline__ void exponentiate_by(const float (&origin)[kRows], P& p,
                                                  float (&tile_sum)[kRows],
                                                  const Exponent& exponent) {
    using namespace cute;
    using Element = typename P::value_type;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(p);
    cutlass::NumericArrayConverter<Element, float, 2> convert;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      tile_sum[r] = 0.0f;
      top[r] = 0;
    }
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); c += 2) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float s2[2];
        cutlass::Array<float, 2> x;
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          float s = scores(r, c + i);
          s2[i] = square(s);
          x[i] = exp2_approx(exponent(s, s2[i], origin[r]));
          tile_sum[r] += x[i];
        }
        top[r] = __vimax3_u32(top[r], __float_as_uint(s2[0]), __float_as_uint(s2[1]));
        pairs(c / 2 * kRows + r) = convert(x);
      }
    }
  }
};

}  // namespace preflash::sm90
