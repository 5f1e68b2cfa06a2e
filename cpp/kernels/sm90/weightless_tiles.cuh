// Tiles that a warpgroup leaves out because they have no weight in any of its rows: where the
// caller asks for that (running_maxima.cuh), and where a bias has taken it from them. Their scores
// are computed, since nothing else tells, but neither P nor O += P V. All threads of a warpgroup
// decide together, because its warps share its products.
//
// K and V still arrive, and a tile that is left out still takes its turn in the order barrier: the
// producers and the other warpgroups go on as if it were computed.
#pragma once

#include "kernels/common/running_maxima.cuh"
#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/score_bias.cuh"
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
    maxima = RunningMaxima<2>::of(at.params, at.state.request, at.params.logits,
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

// Of a kernel with a bias: the tiles of an item that are so far from its rows' last keys that it
// leaves them no weight, unless their logits are much larger than those of the keys before.
// That is found out for each tile, by its scores (kWeightlessBits).
//
// Far tiles are worth a look only where the next ones are likely to go, too. So the tiles behind
// one that stays are computed without a look, twice as many as the last time.
template <class Traits>
struct FarTiles {
  // So few tiles gain nothing: the steps that begin and end the loop are longer than others.
  static constexpr int kFew = 2;

  int end = 0;       // tiles before it are looked at
  int unlooked = 1;  // tiles that are not, behind the next one that stays

  // coordinates: of the warpgroup's item; first_row: the first of its rows, of the item's tile;
  // end_tile: the end of the tiles that they touch.
  __device__ __forceinline__ static FarTiles of(const ScoreCoordinates<Traits>& coordinates,
                                                const ScoreBias<Traits>& bias, int first_row,
                                                int end_tile) {
    float bits_per_key = bias.smallest(coordinates) * coordinates.params.logits.scale_log2;
    int end_key = coordinates.bounds().end_key(coordinates.packed(first_row).token);
    int nearest = min(end_key, end_tile * Traits::kTileN);
    return {warp_uniform((nearest - weightless_distance(bits_per_key)) / Traits::kTileN)};
  }
  // Whether the item's tiles from `tile` down to `last` are to be looked at.
  __device__ __forceinline__ bool begin_at(int tile, int last) const {
    return tile < end && tile >= last + kFew;
  }
  // The tile, a far one, is computed.
  __device__ __forceinline__ void keep(int tile) {
    end = tile - unlooked;
    unlooked *= 2;
  }

  // Whether a tile has weight for any of the request's rows in the warpgroup. scores: without a
  // mask, which would only take some away. NOTE: a NaN has.
  template <class Scores>
  __device__ __forceinline__ static bool weigh(const Scores& scores,
                                               const ScoreCoordinates<Traits>& at,
                                               const ScoreBias<Traits>& bias,
                                               const SpeculativeSoftmax& softmax, int warpgroup) {
    RowShift shift = bias.shift(at.tile);
    float top[2];
    maxima_or_nan(scores, top);
    bool weighs = false;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      float excess = shift.add_to(r, top[r]) - softmax.reference[r];
      bool has_none = excess * at.params.logits.scale_log2 < -kWeightlessBits;
      weighs |= at.row(r) < at.state.num_rows && !has_none;
    }
    return any_of_warpgroup(weighs, warpgroup);
  }

 private:
  // Of this thread's share of each row, in two chains a row.
  template <class Scores>
  __device__ __forceinline__ static void maxima_or_nan(const Scores& scores, float (&result)[2]) {
    float part[2][2];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float& chain = part[r][c % 2];
        chain = c < 2 ? scores(r, c) : max_or_nan(chain, scores(r, c));
      }
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) result[r] = max_or_nan(part[r][0], part[r][1]);
  }
  __device__ __forceinline__ static float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
  }
};

// Of kernels that leave out no tiles for their distance.
template <class Traits>
struct NoFarTiles {};

template <class Traits>
using FarTilesOf = conditional_t<Traits::kStartsFromBias, FarTiles<Traits>, NoFarTiles<Traits>>;

}  // namespace preflash::sm90
