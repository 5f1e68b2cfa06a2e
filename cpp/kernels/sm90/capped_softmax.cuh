// The softmax of scores under a soft cap. A score takes two operations of the special-function unit
// here, which is then as busy as the tensor core. So that neither waits for the other, half of a
// tile is capped beside O += P V, and the other half in one block of code with all exponentials:
// behind O, while the other warpgroup multiplies.
//
// In bfloat16, where P has float32's range, the reference of every row is a constant
// (SoftCap::reference): a capped row needs no maximum. Elsewhere references are those of the
// speculative softmax. In float16 each becomes the row max so far in a row's second tile, too: its
// first tile may leave it few keys, and a cap bounds what later tiles can add to the maximum of a
// whole one.
//
// A row's bits depend neither on which of an item's tiles is the first with its keys, nor on which
// ones are masked.
#pragma once

#include "kernels/sm90/eight_bit_softmax.cuh"
#include "kernels/sm90/soft_cap.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

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
  // A mask would come between the second half and the exponentials.
  static constexpr bool kMasks = true;

  bool is_second[kRows] = {};  // the tile of the next update() is the row's second one

  CUTE_DEVICE void begin(const auto& scores, const NoShift& shift, const auto& segment) {
    *this = {};
    if (!segment.cap.is_bounded()) {
      SpeculativeSoftmax::begin(scores, shift, segment);
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) is_second[r] = has_reference(r);
      return;
    }
    CUTE_UNROLL
    for (float& of_row : reference) of_row = segment.cap.reference;
  }
  CUTE_DEVICE void make_first(const auto& scores, const NoShift& shift, auto& p,
                              const auto& segment) {
    if (!segment.cap.is_bounded()) {
      return SpeculativeSoftmax::make_first(scores, shift, p, segment);
    }
    exponentiate_capped<true>(scores, shift, p, sum, segment.logits.scale_log2);
  }
  CUTE_DEVICE static void before_o(auto&& scores, const NoShift&, const auto& segment) {
    if (segment.cap.form != CapForm::kHardware) return segment.cap.apply(scores, segment.logits);
    if (!kFour) segment.cap.template apply_to_half<0>(scores);
  }
  // mask(): masks the tile, and tells whether any of it was masked.
  CUTE_DEVICE void update(auto&& scores, const NoShift& shift, auto& p, auto& out,
                          const auto& segment, const auto& mask) {
    if (!segment.cap.is_bounded()) {
      if (segment.cap.form == CapForm::kHardware) apply_rest(scores, segment.cap);
      mask();
      if (!kRaises) return SpeculativeSoftmax::update(scores, shift, p, out, segment, mask);
      raise(scores, shift, out, segment.logits.scale_log2);
      const bool had_reference[kRows] = {has_reference(0), has_reference(1)};
      SpeculativeSoftmax::update(scores, shift, p, out, segment, mask);
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) is_second[r] = !had_reference[r] && has_reference(r);
      return;
    }
    const float scale_log2 = segment.logits.scale_log2;
    float tile_sum[kRows];
    apply_rest(scores, segment.cap);
    exponentiate_capped<false>(scores, shift, p, tile_sum, scale_log2);
    // Few tiles are masked: they are computed again.
    if (mask()) exponentiate_capped<true>(scores, shift, p, tile_sum, scale_log2);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r] += tile_sum[r];
  }

 private:
  CUTE_DEVICE bool has_reference(int r) const { return reference[r] != -INFINITY; }

  CUTE_DEVICE void raise(const auto& scores, const auto& shift, auto& out, float scale_log2) {
    if (!__any_sync(0xffffffffu, is_second[0] || is_second[1])) return;
    float tile_max[kRows];
    maxima(scores, shift, tile_max);
    move(tile_max, out, is_second, scale_log2);
  }
  // kMasked: scores may be -inf, which the polynomial does not take.
  template <bool kMasked>
  CUTE_DEVICE void exponentiate_capped(const auto& scores, const auto& shift, auto& p,
                                       float (&tile_sum)[kRows], float scale_log2) const {
    exponentiate(scores, shift, p, tile_sum, scale_log2, [](int column, float x) {
      const bool by_polynomial = kFour && column % 4 == 1 && (!kMasked || x != -INFINITY);
      return by_polynomial ? exp2_polynomial(x) : exp2_approx(x);
    });
  }
  CUTE_DEVICE static void apply_rest(auto&& scores, const SoftCap& cap) {
    if (kFour) cap.template apply_to_half<0>(scores);
    cap.template apply_to_half<1>(scores);
  }
};

template <class Traits>
using SoftmaxOf = conditional_t<
    Traits::kCapsInSoftmax,
    CappedSoftmax<(Traits::kConsumers > 2), Traits::kVariant.q_dtype == DType::kFloat16>,
    conditional_t<Traits::kTransposesV, EightBitSoftmax<Traits::kAddsWeights>, SpeculativeSoftmax>>;

}  // namespace preflash::sm90
