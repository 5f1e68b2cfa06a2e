// What becomes of an item's raw scores before they are masked: factors of heads, the soft cap and
// ALiBi.
#pragma once

#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/forward_products.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ScoreTreatment {
  using Coordinates = ScoreCoordinates<Traits>;
  using Transform = LogitsTransform<Traits::kVariant.logits>;

  // Whether a score is more than its dot product before it is masked, and is made so between the
  // steps of P V. NOTE: factors of heads come first, mask bits take the registers that it needs,
  // and slices of V are products of their own: those kernels treat scores once S is accepted.
  static constexpr bool kAmidPv = (Traits::kVariant.logits != Logits::kPlain ||
                                   Traits::kVariant.position == Position::kAlibi) &&
                                  !Traits::kTransforms && !Traits::kHasMaskBits && !Traits::kSliced;
  // The steps of P V that cover the wait for S and, of ALiBi alone, all of its work.
  static constexpr int kStepsAhead =
      Traits::kVariant.logits == Logits::kPlain ? Traits::kTileN / 32 : 2;

  ScoreBias<Traits> bias;
  ScoreFactors<Traits> factors;

  __device__ __forceinline__ static ScoreTreatment of(const Coordinates& of_item,
                                                      const SharedStorage<Traits>& smem) {
    return {ScoreBias<Traits>::of(of_item), ScoreFactors<Traits>::of(of_item, smem)};
  }

  // All scores of a tile.
  template <class Scores>
  __device__ __forceinline__ void apply(Scores&& scores, const LogitsParams& logits) const {
    transform(scores, logits);
    bias.add_to(scores, {0, size<1>(scores)});
  }
  template <class Scores>
  __device__ __forceinline__ void apply_to_first(const Coordinates& coordinates, Scores&& scores,
                                                 const LogitsParams& logits) const {
    transform(scores, logits);
    bias.add_to_first(coordinates, scores);
  }

  // Issues O += P V with the treatment of S between its steps. Behind it that would lengthen the
  // loop: a warp that issues P V is held until the tensor core has come to its end. What is left
  // takes finish_amid_pv(): large logits take long.
  __device__ __forceinline__ Transform issue_pv_amid(ForwardProducts<Traits>& products, int v_stage,
                                                     const LogitsParams& logits) const {
    Tensor rows_of_s = products.rows_of_s();
    Transform transform;
    products.template issue_pv_amid<kStepsAhead>(
        v_stage, [&] { transform.begin(rows_of_s, logits); },
        [&](ColumnSpan span) {
          if (!transform.small) return;
          transform.finish(rows_of_s, span);
          bias.add_to(rows_of_s, span);
        });
    return transform;
  }
  template <class Scores>
  __device__ __forceinline__ void finish_amid_pv(const Transform& transform,
                                                 Scores&& scores) const {
    if (transform.small) return;
    transform.finish_large(scores);
    bias.add_to(scores, {0, size<1>(scores)});
  }

 private:
  template <class Scores>
  __device__ __forceinline__ static void transform(Scores&& scores, const LogitsParams& logits) {
    Transform transform;
    transform.begin(scores, logits);
    if (transform.small) {
      transform.finish(scores, {0, size<1>(scores)});
    } else {
      transform.finish_large(scores);
    }
  }
};

}  // namespace preflash::sm90
