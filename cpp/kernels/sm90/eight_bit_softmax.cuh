// The speculative softmax of weights that are rounded to e4m3, whose numbers lie in [2^-9, 448].
//
// Whenever O has been added to its sums (EightBitOperands), the reference of each row follows the
// weights since the last time, up or down, which costs nothing but a factor of the sums. Upwards it
// spares failures of the speculation: where logits vary much, later tiles exceed the first one's
// row max. Downwards it keeps weights: after a large logit, such as a query's with its own key, the
// weights of all other keys would be rounded to 0, and together they may outweigh it
// (docs/dev/experiments/fp8-products.md). Those of up to eight tiles right behind it still are.
#pragma once

#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// Has the hooks of SpeculativeSoftmax.
struct EightBitSoftmax : SpeculativeSoftmax {
  static constexpr float kExponent = exponent_of(DType::kFloat8E4M3);
  // Between these lies log2 of the largest sum that a thread of the row had in a tile, or before
  // the second tile log2 of that tile's largest weight, once the reference has followed. More than
  // a first reference gives would be lost from the range below a row's largest weight.
  static constexpr float kLeastExponent = 2;  // 32 equal weights are 2^-3 each
  static constexpr float kMostExponent = kExponent;
  // No reference follows further down than until a thread's share of the row sum is 2 to this, so
  // that neither it nor O overflows.
  static constexpr float kMaxSumExponent = 30;

  bool at_second = true;  // whether the next tile is the second one
  // This thread's largest sum of a tile since O was added up, relative to the present reference.
  float largest_sum[kRows] = {0, 0};

  template <class Scores, class Shift, class Segment>
  __device__ __forceinline__ void begin(const Scores& scores, const Shift& shift, const Segment&) {
    *this = {};
    maxima(scores, shift, reference);
  }
  // O has been added to its sums.
  template <class Segment>
  __device__ __forceinline__ void follow(const Segment& segment) {
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      shift_reference(r, log2_approx(quad_max(largest_sum[r])), segment);
      largest_sum[r] = 0.0f;
    }
  }
  // O has been added up before the second tile, whose row max is found as the first one's is.
  template <class Scores, class Shift, class P, class Out, class Segment>
  __device__ __forceinline__ void update(const Scores& scores, const Shift& shift, P& p, Out& out,
                                         const Segment& segment) {
    // NOTE: `settled` comes from a vote, so the compiler knows that all lanes take this branch
    // together. It would not know so of `at_second`.
    if (!settled) {
      const float scale_log2 = segment.logits.scale_log2;
      float tile_max[kRows];
      maxima(scores, shift, tile_max);
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const float origin = scaled_reference(reference[r], scale_log2);
        const float found = fmaf(tile_max[r], scale_log2, kExponent - origin);
        shift_reference(r, at_second ? found : -INFINITY, segment);
      }
      settle(tile_max);
      at_second = false;
    }
    const float before[kRows] = {reference[0], reference[1]};
    float tile_sum[kRows];
    speculate(scores, shift, p, tile_sum, out, segment);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      // Where the speculation failed, all earlier sums of the row are smaller than the one that
      // did.
      const bool moved = reference[r] != before[r];
      largest_sum[r] = moved ? tile_sum[r] : fmaxf(largest_sum[r], tile_sum[r]);
    }
  }

 private:
  // found: log2 of a weight or a sum of some. -inf, or a row without a reference: there is none.
  // With row maxima as output references are those.
  template <class Segment>
  __device__ __forceinline__ void shift_reference(int r, float found, const Segment& segment) {
    const bool follows = segment.max_sum > max_sum(LseForm::kMaxAndSum, DType::kFloat8E4M3) &&
                         fabsf(found) < INFINITY && reference[r] != -INFINITY;
    const float room = log2_approx(quad_max(sum[r])) - kMaxSumExponent;
    const float down = fminf(fmaxf(found - kLeastExponent, room), 0.0f);
    const float change = follows ? fmaxf(found - kMostExponent, down) : 0.0f;
    if (__any_sync(0xffffffffu, change != 0.0f)) {
      const float scale_log2 = segment.logits.scale_log2;
      const float x_per_bit = segment.x_per_logit * (1.0f / kLog2E);
      const float next = change == 0.0f ? reference[r] : fmaf(change, x_per_bit, reference[r]);
      if (reference[r] != -INFINITY) sum[r] *= change_of_reference(reference[r], next, scale_log2);
      reference[r] = next;
    }
  }
};

}  // namespace preflash::sm90
