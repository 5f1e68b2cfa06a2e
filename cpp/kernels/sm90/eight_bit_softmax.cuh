// The online softmax of weights that are rounded to e4m3, whose numbers lie in [2^-9, 448].
//
// A tile's row maxima are found beside the products of O: speculation would fail in most tiles of
// logits as models have them, and then all warps of a warpgroup wait for the one that computes its
// exponentials again. A row's reference moves when a weight would exceed the range.
//
// Whenever O has been added to its sums (EightBitOperands), the reference of each row becomes the
// row max since the last time. Upwards that spares moves. Downwards it keeps weights: after a large
// logit, such as a query's with its own key, the weights of all other keys would be rounded to 0,
// and together they may outweigh it (docs/dev/experiments/fp8-products.md). Those of up to six
// tiles right behind it still are.
#pragma once

#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// Has the hooks of SpeculativeSoftmax. kAddsWeights: `sum` is the sum of weights before they are
// rounded, for the LSE. O is divided by the row sums of EightBitOperands.
template <bool kAddsWeights>
struct EightBitSoftmax : SpeculativeSoftmax {
  // A logit that exceeds the reference by more moves it: the weight would be 2^8.7.
  static constexpr float kRoom = 4.7f / kLog2E;
  // A reference that has followed exceeds the row max by no more: a weight of 2^2.
  static constexpr float kSlack = 2.0f / kLog2E;
  // No reference follows further down than until `totals` are 2 to this, so that neither they nor O
  // overflow.
  static constexpr float kMaxSumExponent = 30;

  // Maxima of this thread's scores since O was added to its sums.
  float largest[kRows] = {-INFINITY, -INFINITY};
  bool moved = false;   // a reference of the warp moved for the present tile
  float factor[kRows];  // rescales O, if moved

  CUTE_DEVICE void begin(const auto& scores, const auto& shift, const auto&) {
    *this = {};
    maxima(scores, shift, reference);
  }
  CUTE_DEVICE void make_first(const auto& scores, const auto& shift, auto& p, const auto& segment) {
    float tile_sum[kRows];
    exponentiate(scores, shift, p, tile_sum, segment.logits.scale_log2);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r] += kAddsWeights ? tile_sum[r] : 0.0f;
  }
  // NOTE: without the branch ptxas would move the wait for O to before the comparisons.
  CUTE_DEVICE void before_o(const auto& scores, const auto& shift, const auto& segment) {
    const float room = returns_maxima(segment) ? 0.0f : kRoom * segment.x_per_logit;
    float tile_max[kRows];
    thread_maxima(scores, tile_max);
    bool exceeds = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      tile_max[r] = shift.add_to(r, tile_max[r]);
      largest[r] = fmaxf(largest[r], tile_max[r]);
      exceeds |= tile_max[r] > reference[r] + room;
    }
    moved = __any_sync(0xffffffffu, exceeds);
    if (moved) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float row_max = quad_max(tile_max[r]);
        const float next = row_max > reference[r] + room ? row_max : reference[r];
        factor[r] = change_to(r, next, segment);
        sum[r] *= factor[r];
        reference[r] = next;
      }
    }
  }
  CUTE_DEVICE void after_o(auto&& out) const {
    if (moved) for_each_element(out, [&](int r, int, float& x) { x *= factor[r]; });
  }
  // O has been added to its sums. totals: the row sums so far, times kRowSumFactor, relative to the
  // references.
  CUTE_DEVICE void follow(const auto& segment, const float (&totals)[kRows]) {
    const float x_per_bit = segment.x_per_logit * (1.0f / kLog2E);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float row_max = quad_max(largest[r]);
      const float highest = fmaf(kSlack, segment.x_per_logit, row_max);
      const float room = kMaxSumExponent - log2_approx(totals[r]);
      const float lowest = fmaxf(row_max, fmaf(-room, x_per_bit, reference[r]));
      const float next = fmaxf(fminf(reference[r], highest), lowest);
      if (next != reference[r] && row_max != -INFINITY && !returns_maxima(segment)) {
        sum[r] *= change_to(r, next, segment);
        reference[r] = next;
      }
      largest[r] = -INFINITY;
    }
  }
  CUTE_DEVICE void update(const auto& scores, const auto& shift, auto& p, auto&,
                          const auto& segment, const auto&) {
    make_first(scores, shift, p, segment);
  }

 private:
  // True if row maxima are output: the references must then be the maxima.
  CUTE_DEVICE static bool returns_maxima(const auto& segment) {
    return segment.max_sum <= max_sum(LseForm::kMaxAndSum, DType::kFloat8E4M3);
  }
  // Returns the factor that rescales sums to reference `next`. No branch, unlike
  // change_of_reference(): for a row without keys the product is -inf, and its sum is 0.
  CUTE_DEVICE float change_to(int r, float next, const auto& segment) const {
    const float scale_log2 = segment.logits.scale_log2;
    const float bits = __fmul_rn(reference[r], scale_log2) - __fmul_rn(next, scale_log2);
    return next == reference[r] ? 1.0f : exp2_approx(bits);
  }
};

}  // namespace preflash::sm90
