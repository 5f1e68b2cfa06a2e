// The softmax of scores under a soft cap. It makes a tile's exponentials in place before O is
// complete, so the tensor core and the special-function unit, which has two operations for each
// score here, work at the same time.
// In bfloat16, where P has float32's range, the reference of every row is a constant
// (SoftCap::reference): a capped row needs no maximum. Elsewhere the reference is the row max so
// far.
#pragma once

#include "kernels/common/convert.cuh"
#include "kernels/sm90/eight_bit_softmax.cuh"
#include "kernels/sm90/soft_cap.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// Has the hooks of SpeculativeSoftmax.
struct CappedSoftmax : SpeculativeSoftmax {
  float change[kRows];  // of O, from the last tile's references to this one's

  template <class Scores, class Shift, class Segment>
  __device__ __forceinline__ void begin(const Scores& scores, const Shift& shift,
                                        const Segment& segment) {
    *this = {};
    set_references(scores, shift, segment);
  }
  template <class Scores, class Shift, class P, class Segment>
  __device__ __forceinline__ void make_first(Scores&& scores, const Shift& shift, P& p,
                                             const Segment& segment) {
    exponentiate(scores, shift, segment.logits.scale_log2);
    round_to(scores, p);
  }
  template <class Scores, class Shift, class Segment>
  __device__ __forceinline__ void before_o(Scores&& scores, const Shift& shift,
                                           const Segment& segment) {
    set_references(scores, shift, segment);
    exponentiate(scores, shift, segment.logits.scale_log2);
  }
  template <class Scores, class Shift, class P, class Out, class Segment>
  __device__ __forceinline__ void update(const Scores& scores, const Shift&, P& p, Out& out,
                                         const Segment& segment) {
    if (!segment.cap.is_bounded() &&
        __any_sync(0xffffffffu, change[0] < 1.0f || change[1] < 1.0f)) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        CUTE_UNROLL
        for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= change[r];
      }
    }
    round_to(scores, p);
  }

 private:
  template <class Scores, class Shift, class Segment>
  __device__ __forceinline__ void set_references(const Scores& scores, const Shift& shift,
                                                 const Segment& segment) {
    if (segment.cap.is_bounded()) {
      CUTE_UNROLL
      for (float& of_row : reference) of_row = segment.cap.reference;
      return;
    }
    float tile_max[kRows];
    maxima(scores, shift, tile_max);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const float next = fmaxf(reference[r], tile_max[r]);
      change[r] = change_of_reference(reference[r], next, segment.logits.scale_log2);
      sum[r] *= change[r];
      reference[r] = next;
    }
  }
  template <class Scores, class Shift>
  __device__ __forceinline__ void exponentiate(Scores&& scores, const Shift& shift,
                                               float scale_log2) {
    float offset[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      offset[r] = shift.origin(r, scaled_reference(reference[r], scale_log2), scale_log2);
    }
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(scores); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        scores(r, c) = exp2_approx(fmaf(scores(r, c), scale_log2, -offset[r]));
        sum[r] += scores(r, c);
      }
    }
  }
};

template <class Traits>
using SoftmaxOf =
    conditional_t<Traits::kCapsAlone, CappedSoftmax,
                  conditional_t<Traits::kTransposesV, EightBitSoftmax, SpeculativeSoftmax>>;

}  // namespace preflash::sm90
