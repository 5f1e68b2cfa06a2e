// Skipped tiles: where the caller asks for it, a warpgroup computes the scores of a tile but not P
// and O += P V if all weights in its rows are small (running_maxima.cuh). All its threads decide
// together, because they share products; for all others the tile is like any.
#pragma once

#include "kernels/common/running_maxima.cuh"
#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// Whether `mine` holds for any thread of the warpgroup.
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
  RunningMaxima<2> maxima;
  bool this_tile = false;  // whether the tile that was looked at last is skipped

  // An item's first tile is computed.
  CUTE_DEVICE void begin(const ScoreCoordinates<Traits>& at, const auto& scores) {
    maxima = RunningMaxima<2>::of(at.params, at.state.request,
                                  [&](int r) { return at.row(r) < at.state.num_rows; });
    float tile_max[2];
    SpeculativeSoftmax::maxima(scores, NoShift{}, tile_max);
    maxima.take(tile_max);
    this_tile = false;
  }
  // scores: masked. stays: whether the tile is computed in any case.
  CUTE_DEVICE void look_at(const auto& scores, bool stays, int warpgroup) {
    float tile_max[2];
    SpeculativeSoftmax::maxima(scores, NoShift{}, tile_max);
    this_tile = !any_of_warpgroup(maxima.take(tile_max) || stays, warpgroup);
  }
};

// Of kernels that compute every tile.
template <class Traits>
struct EveryTile {
  static constexpr bool this_tile = false;

  CUTE_DEVICE static void begin(const ScoreCoordinates<Traits>&, const auto&) {}
  CUTE_DEVICE static void look_at(const auto&, bool, int) {}
};

template <class Traits>
using SkippedTilesOf = conditional_t<Traits::kVariant.sparsity == Sparsity::kSkipping,
                                     SkippedTiles<Traits>, EveryTile<Traits>>;

}  // namespace preflash::sm90
