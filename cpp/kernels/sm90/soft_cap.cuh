// The soft cap c * tanh(logit / c) of raw dot products s, as the softmax takes it: x = tanh(y),
// y = s * sm_scale / c, of which the logit is c * x.
//
// tanh.approx.f32 takes one operation of the unit that the exponentials use, and its relative error
// is 2^-11. PREFLASH_SOFT_CAP=exact, and launches that return the row maxima themselves, take
// float32's accuracy for up to three times the time
// (docs/dev/experiments/fa3-softmax-and-options.md).
#pragma once

#include <cmath>
#include <cstdlib>
#include <string_view>

#include "kernels/common/logits.cuh"
#include "kernels/sm90/speculative_softmax.cuh"
#include "preflash/params.h"

namespace preflash::sm90 {

enum class CapForm : std::uint8_t { kNone, kHardware, kExact };

struct SoftCap {
  // The reference of a row in base 2, where P is bfloat16 and the cap at most kLargestBounded: P is
  // then between 2^-89 and 2^57, and values of V up to 2^50 do not overflow.
  static constexpr float kReference = 16.0f;
  static constexpr float kLargestBounded = 50.0f;

  float y_per_s;      // sm_scale / c
  float row_max_ref;  // of every row, in units of x; -inf: its maximum so far
  CapForm form;

  __host__ __device__ bool is_bounded() const { return row_max_ref != -INFINITY; }

  // Returns nullptr, or what is wrong with PREFLASH_SOFT_CAP.
  const char* set(const ForwardSegment& segment, DType p_dtype, float scale_log2) {
    const char* asked = std::getenv("PREFLASH_SOFT_CAP");
    const std::string_view value = asked == nullptr ? "hardware" : asked;
    if (value != "hardware" && value != "exact") {
      return "PREFLASH_SOFT_CAP is neither hardware nor exact";
    }
    const bool exact = value == "exact" || segment.lse.form == LseForm::kMaxAndSum;
    const bool caps = segment.soft_cap > 0.0f;
    form = !caps ? CapForm::kNone : exact ? CapForm::kExact : CapForm::kHardware;
    y_per_s = caps ? segment.sm_scale / segment.soft_cap : 0.0f;
    const bool bounded = form == CapForm::kHardware && p_dtype == DType::kBFloat16 &&
                         segment.soft_cap <= kLargestBounded;
    row_max_ref = bounded ? kReference / scale_log2 : -INFINITY;
    return nullptr;
  }
  // Caps a whole tile, in place.
  CUTE_DEVICE void apply(auto&& scores, const LogitsParams& logits) const {
    if (form == CapForm::kHardware) {
      apply_to_half<0>(scores);
      apply_to_half<1>(scores);
    } else if (form == CapForm::kExact) {
      transform_logits<Logits::kSoftCap>(scores, logits);
    }
  }
  // Caps the first or the second half of the columns, in the hardware's form.
  template <int kHalf, class Scores>
  CUTE_DEVICE void apply_to_half(Scores&& scores) const {
    constexpr int kScores = decltype(cute::size(scores))::value / 2;
    CUTE_UNROLL
    for (int i = kHalf * kScores; i < (kHalf + 1) * kScores; ++i) {
      scores(i) = tanh_approx(scores(i) * y_per_s);
    }
  }
};

// The softmax of scores under a soft cap: two operations of the special-function unit for a score,
// which keep it as busy as the tensor core. So that neither waits for the other, half of a tile is
// capped beside O += P V, and the other half with all exponentials after O, while the other
// warpgroup multiplies.
//
// In bfloat16, where P has float32's range, the reference of every row is a constant
// (SoftCap::reference): a capped row needs no maximum. Elsewhere references are those of the
// speculative softmax. In float16 each becomes the row max so far in a row's second tile, too: its
// first tile may leave it few keys, and a cap bounds what later tiles can add.
//
// A row's bits depend neither on which of an item's tiles is the first with its keys, nor on which
// ones are masked.

// 2^x without the special-function unit, for -126 <= x < 127: relative error 7.5e-5.
CUTE_DEVICE float exp2_polynomial(float x) {
  constexpr float kShift = 0x1.8p23f + 127.0f;  // leaves the biased exponent in the low bits
  const float shifted = x + kShift;
  const float fraction = x - (shifted - kShift);
  float y = fmaf(fraction, 0.05517167f, 0.24261113f);
  y = fmaf(y, fraction, 0.69326099f);
  y = fmaf(y, fraction, 0.99992807f);
  return y * __uint_as_float(__float_as_uint(shifted) << 23);
}

// Has the hooks of SpeculativeSoftmax. kFour: of four warpgroups some always use the
// special-function unit. So all of a tile is capped behind O, and every fourth exponential is a
// polynomial. kRaises: in float16.
template <bool kFour, bool kRaises>
struct CappedSoftmax : SpeculativeSoftmax {
  bool is_second[kRows] = {};  // the tile of the next update() is the row's second one

  CUTE_DEVICE void begin(auto& mma, const NoShift& shift, const auto& segment) {
    *this = {};
    if (!segment.cap.is_bounded()) {
      SpeculativeSoftmax::begin(mma, shift, segment);
      for_rows([&](int r) { is_second[r] = has_reference(r); });
      return;
    }
    CUTE_UNROLL
    for (float& of_row : row_max_ref) of_row = segment.cap.row_max_ref;
  }
  CUTE_DEVICE void update(auto& mma, const NoShift& shift, const auto& segment) {
    if (!segment.cap.is_bounded()) return SpeculativeSoftmax::update(mma, shift, segment);
    exponentiate_capped<true>(mma, sum, segment.logits.scale_log2);
  }
  // Masks nothing: a mask would come between the second half and the exponentials.
  CUTE_DEVICE static void before_o(auto& mma, const NoShift&, const auto& segment, const auto&) {
    auto scores = mma.rows_of_s();
    if (segment.cap.form != CapForm::kHardware) return segment.cap.apply(scores, segment.logits);
    if (!kFour) segment.cap.template apply_to_half<0>(scores);
  }
  CUTE_DEVICE void update(auto& mma, const NoShift& shift, const auto& segment, const auto& mask) {
    auto scores = mma.rows_of_s();
    if (!segment.cap.is_bounded()) {
      if (segment.cap.form == CapForm::kHardware) apply_rest(scores, segment.cap);
      mask();
      if (!kRaises) return SpeculativeSoftmax::update(mma, shift, segment, mask);
      raise(mma, segment.logits.scale_log2);
      const bool had_reference[kRows] = {has_reference(0), has_reference(1)};
      SpeculativeSoftmax::update(mma, shift, segment, mask);
      for_rows([&](int r) { is_second[r] = !had_reference[r] && has_reference(r); });
      return;
    }
    const float scale_log2 = segment.logits.scale_log2;
    float tile_sum[kRows];
    apply_rest(scores, segment.cap);
    exponentiate_capped<false>(mma, tile_sum, scale_log2);
    // Few tiles are masked: they are computed again.
    if (mask()) exponentiate_capped<true>(mma, tile_sum, scale_log2);
    for_rows([&](int r) { sum[r] += tile_sum[r]; });
  }

 private:
  CUTE_DEVICE bool has_reference(int r) const { return row_max_ref[r] != -INFINITY; }

  CUTE_DEVICE void raise(auto& mma, float scale_log2) {
    if (!__any_sync(0xffffffffu, is_second[0] || is_second[1])) return;
    float tile_max[kRows];
    maxima(mma.rows_of_s(), NoShift{}, tile_max);
    move(tile_max, mma.rows_of_o(), is_second, scale_log2);
  }
  // kMasked: scores may be -inf, which the polynomial does not take.
  template <bool kMasked>
  CUTE_DEVICE void exponentiate_capped(auto& mma, float (&tile_sum)[kRows],
                                       float scale_log2) const {
    auto exp2_of = [](int column, float x) {
      const bool by_polynomial = kFour && column % 4 == 1 && (!kMasked || x != -INFINITY);
      return by_polynomial ? exp2_polynomial(x) : exp2_approx(x);
    };
    exponentiate(mma.rows_of_s(), NoShift{}, mma.tOrP, tile_sum, scale_log2, exp2_of);
  }
  CUTE_DEVICE static void apply_rest(auto&& scores, const SoftCap& cap) {
    if (kFour) cap.template apply_to_half<0>(scores);
    cap.template apply_to_half<1>(scores);
  }
};

}  // namespace preflash::sm90
