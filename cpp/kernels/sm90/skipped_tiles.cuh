// Skipped tiles: where the caller asks for it, a warpgroup computes the scores of a tile but not P
// and O += P V if all weights in its rows are small (running_maxima.cuh). All its threads decide
// together, because they share products; for all others the tile is like any.
#pragma once

#include "kernels/common/running_maxima.cuh"
#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// True if `mine` holds for any thread of the warpgroup.
CUTE_DEVICE bool any_of_warpgroup(bool mine, int warpgroup) {
  int barrier = NamedBarriers::kReserved + NamedBarriers::kWarpgroup + warpgroup;
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.s32 p, %1, 0;\n"
      "barrier.cta.red.or.pred q, %2, %3, p;\n"
      "selp.s32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "r"(barrier), "n"(kWarpgroupThreads)
      : "memory");
  return warp_uniform(any) != 0;
}

template <class Traits>
struct SkippedTiles {
  static constexpr bool kSkips = Traits::kVariant.sparsity == Sparsity::kSkipping;

  RunningMaxima<2> maxima;
  bool skips = false;

  // True if the tile that was looked at last is skipped.
  CUTE_DEVICE bool latest_tile() const { return kSkips && skips; }
  // An item's first tile is computed.
  CUTE_DEVICE void begin(const ScoreCoordinates<Traits>& at, const auto& scores) {
    if constexpr (kSkips) {
      maxima = RunningMaxima<2>::of(at.params, at.state.request,
                                    [&](int r) { return at.row(r) < at.state.num_rows; });
      has_weight(scores);
      skips = false;
    }
  }
  // scores: masked. stays: whether the tile is computed in any case.
  CUTE_DEVICE void look_at(const auto& scores, bool stays, int warpgroup) {
    if constexpr (kSkips) skips = !any_of_warpgroup(has_weight(scores) || stays, warpgroup);
  }

 private:
  // True if the tile has weight in one of this thread's rows.
  CUTE_DEVICE bool has_weight(const auto& scores) {
    float tile_max[2];
    SpeculativeSoftmax::maxima(scores, NoShift{}, tile_max);
    return maxima.take(tile_max);
  }
};

}  // namespace preflash::sm90
