// Tiles that a warpgroup skips because all weights in its rows are small, where the caller asks for
// that (running_maxima.cuh). The scores of a skipped tile are computed; P and O += P V are not. All
// threads of a warpgroup decide together, because its warps share its products.
//
// K and V of a skipped tile are still loaded, and the tile still takes its turn in the order
// barrier: the producers and the other warpgroups work as if the tile were computed.
#pragma once

#include "kernels/common/running_maxima.cuh"
#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// Whether `mine` holds for any thread of the warpgroup.
__device__ __forceinline__ bool any_of_warpgroup(bool mine, int warpgroup) {
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
struct WeightlessTiles {
  RunningMaxima<2> maxima;
  bool left_out = false;  // the last tile that was looked at

  // An item's first tile is computed.
  template <class Scores>
  __device__ __forceinline__ void begin(const ScoreCoordinates<Traits>& at, const Scores& scores) {
    maxima = RunningMaxima<2>::of(at.params, at.state.request,
                                  [&](int r) { return at.row(r) < at.state.num_rows; });
    float tile_max[2];
    SpeculativeSoftmax::maxima(scores, NoShift{}, tile_max);
    maxima.take(tile_max);
    left_out = false;
  }
  // scores: masked. stays: whether the tile is computed in any case.
  template <class Scores>
  __device__ __forceinline__ void look_at(const Scores& scores, bool stays, int warpgroup) {
    float tile_max[2];
    SpeculativeSoftmax::maxima(scores, NoShift{}, tile_max);
    left_out = !any_of_warpgroup(maxima.take(tile_max) || stays, warpgroup);
  }
};

// Of kernels that compute every tile.
template <class Traits>
struct EveryTile {
  static constexpr bool left_out = false;

  template <class Scores>
  __device__ __forceinline__ static void begin(const ScoreCoordinates<Traits>&, const Scores&) {}
  template <class Scores>
  __device__ __forceinline__ static void look_at(const Scores&, bool, int) {}
};

template <class Traits>
using TilesLeftOut = conditional_t<Traits::kVariant.sparsity == Sparsity::kSkipping,
                                   WeightlessTiles<Traits>, EveryTile<Traits>>;

}  // namespace preflash::sm90
