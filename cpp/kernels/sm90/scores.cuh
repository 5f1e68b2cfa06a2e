// What is done to a tile's scores between Q K^T and the mask: factors of heads, the soft cap, the
// bias of a position encoding.
#pragma once

#include "kernels/sm90/score_bias.cuh"

namespace preflash::sm90 {

// The factors of one item's rows: of heads, with 8-bit queries and keys, and the powers of two of
// narrowed rows of Q.
template <class Traits>
struct HeadFactors {
  using Coordinates = ScoreCoordinates<Traits>;

  float row[Coordinates::kRows];

  CUTE_DEVICE static HeadFactors of(const Coordinates& coordinates,
                                    const SharedStorage<Traits>& smem) {
    HeadFactors factors = of(coordinates);
    if constexpr (Traits::kConverts) {
      if (!Traits::narrows_query(coordinates.params.q_dtype)) return factors;
      CUTE_UNROLL
      for (int r = 0; r < Coordinates::kRows; ++r) {
        factors.row[r] *= smem.query_scale[coordinates.row(r)];
      }
    }
    return factors;
  }
  // Of the heads alone.
  CUTE_DEVICE static HeadFactors of(const Coordinates& coordinates) {
    const RunExtras& extras = coordinates.params.extras;
    float of_k = 1.0f;
    if (extras.scale_k != nullptr) of_k = __ldg(extras.scale_k + coordinates.state.item.kv_head);
    HeadFactors factors;
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      factors.row[r] = of_k;
      if (extras.scale_q != nullptr) {
        factors.row[r] *= __ldg(extras.scale_q + coordinates.head(r));
      }
    }
    return factors;
  }

  CUTE_DEVICE void apply(auto&& scores) const {
    if (!__any_sync(0xffffffffu, row[0] != 1.0f || row[1] != 1.0f)) return;
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) scores(r, c) *= row[r];
    }
  }
};

template <class Traits>
struct NoHeadFactors {
  CUTE_DEVICE static NoHeadFactors of(const ScoreCoordinates<Traits>&,
                                      const SharedStorage<Traits>&) {
    return {};
  }
  CUTE_DEVICE static void apply(auto&&) {}
};

template <class Traits>
using ScoreFactors = conditional_t<Traits::kHasFactors, HeadFactors<Traits>, NoHeadFactors<Traits>>;

// Of one item's rows, in a thread's registers.
template <class Traits>
struct Scores {
  using Coordinates = ScoreCoordinates<Traits>;

  ScoreBias<Traits> bias;
  ScoreFactors<Traits> factors;

  CUTE_DEVICE static Scores of(const Coordinates& of_item, const SharedStorage<Traits>& smem) {
    return {ScoreBias<Traits>::of(of_item), ScoreFactors<Traits>::of(of_item, smem)};
  }

  // scores: (row, column) view of a whole accumulator.
  CUTE_DEVICE void finish(const HopperSegment& segment, auto&& scores) const {
    factors.apply(scores);
    if constexpr (Traits::kCaps && !Traits::kCapsInSoftmax) {
      segment.cap.apply(scores, segment.logits);
    }
    bias.add_to(scores);
  }
  // Of an item's first tile.
  CUTE_DEVICE void finish_first(const HopperSegment& segment, const Coordinates& coordinates,
                                auto&& scores) const {
    if constexpr (Traits::kCapsInSoftmax) segment.cap.apply(scores, segment.logits);
    finish(segment, scores);
    bias.add_to_first(coordinates, scores);
  }
};

}  // namespace preflash::sm90
