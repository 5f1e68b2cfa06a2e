// Operations on a tile's scores between Q K^T and the mask: factors of heads, the soft cap, the
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
  bool any;  // a factor of the warp is not 1

  // of_query(r): of row r of Q.
  CUTE_DEVICE static HeadFactors of(const Coordinates& coordinates, const auto& of_query) {
    HeadFactors factors{};
    if constexpr (Traits::kHasFactors) {
      const RunExtras& extras = coordinates.params.extras;
      float of_k = 1.0f;
      if (extras.scale_k != nullptr) of_k = __ldg(extras.scale_k + coordinates.state.item.kv_head);
      CUTE_UNROLL
      for (int r = 0; r < Coordinates::kRows; ++r) {
        factors.row[r] = of_k * of_query(r);
        if (extras.scale_q != nullptr) {
          factors.row[r] *= __ldg(extras.scale_q + coordinates.head(r));
        }
      }
      factors.any = __any_sync(0xffffffffu, factors.row[0] != 1.0f || factors.row[1] != 1.0f);
    }
    return factors;
  }

  CUTE_DEVICE void apply(auto&& scores) const {
    if constexpr (Traits::kHasFactors) {
      if (any) for_each_element(scores, [&](int r, int, float& x) { x *= row[r]; });
    }
  }
};

// Bias and factors of one item's rows, in a thread's registers.
template <class Traits>
struct Scores {
  using Coordinates = ScoreCoordinates<Traits>;

  ScoreBias<Traits> bias;
  HeadFactors<Traits> factors;

  CUTE_DEVICE static Scores of(const Coordinates& of_item, SharedStorage<Traits>& smem) {
    auto of_query = [&](int r) {
      if constexpr (Traits::kConverts) {
        if (Traits::narrows_query(of_item.params.q_dtype))
          return conversion_of(smem).query_scale[of_item.row(r)];
      }
      return 1.0f;
    };
    return {ScoreBias<Traits>::of(of_item), HeadFactors<Traits>::of(of_item, of_query)};
  }

  // scores: (row, column) view of a whole accumulator.
  CUTE_DEVICE void finish(const HopperSegment& segment, auto&& scores) const {
    factors.apply(scores);
    if constexpr (Traits::kCaps && !Traits::kCapsInSoftmax) {
      segment.cap.apply(scores, segment.logits);
    }
    bias.add_to(scores);
  }
  // Finishes an item's first tile.
  CUTE_DEVICE void finish_first(const HopperSegment& segment, const Coordinates& coordinates,
                                auto&& scores) const {
    if constexpr (Traits::kCapsInSoftmax) segment.cap.apply(scores, segment.logits);
    finish(segment, scores);
    bias.add_to_first(coordinates, scores);
  }
};

}  // namespace preflash::sm90
