// The tiles of keys of an item as a consumer warpgroup goes through them, from the highest down:
// policies, of which TilesOf is the variant's. at(tile): the coordinates of a tile of the item.
//   look_ahead(item)    the item comes next: returns the argument of mask_first()
//   begin_step()        the tile that was looked ahead to is the step's
//   meanwhile(item)     while the products of an item's first step run
//   for_others(step)    the item's other steps: step(tile, work to do while the products run)
#pragma once

#include "kernels/common/running_maxima.cuh"
#include "kernels/sm90/mask_tile_pipeline.cuh"

namespace preflash::sm90 {

// All tiles in which a row of the warpgroup may see a key, by length, causal and window.
template <class Traits>
struct DenseTiles {
  using Mask = TileMask<Traits>;

  // State of an item's first step, made ahead of time by look_ahead().
  struct First {
    Mask mask = {};
  };

  CUTE_DEVICE static First look_ahead(const auto& item, const auto& at) {
    if (!item.any() || !item.own.needs_mask(first(item))) return {};
    return {Mask::of_bounds(at(first(item)))};
  }
  CUTE_DEVICE static void begin_step() {}
  CUTE_DEVICE static void meanwhile(const auto&, const auto&) {}

  CUTE_DEVICE static int first(const auto& item) { return item.own.end - 1; }
  CUTE_DEVICE static bool is_last(const auto& item, int tile) { return tile == item.own.begin; }
  // True if the item's first step prepares the transition to the next item.
  CUTE_DEVICE static bool prepares_in_first_step(const auto& item) {
    return !Traits::kPreparesInLastStep || item.own.count() == 1;
  }
  CUTE_DEVICE static void for_others(const auto& item, const auto&, const auto& step,
                                     const auto& prepare) {
    int tile = first(item) - 1;
    for (; tile >= item.own.begin + Traits::kPreparesInLastStep; --tile) step(tile, [] {});
    if (Traits::kPreparesInLastStep && tile >= item.own.begin) step(tile, prepare);
  }

  CUTE_DEVICE static void mask_first(const auto& item, const First& ahead, auto&& scores) {
    if (item.own.needs_mask(first(item))) ahead.mask.apply(scores);
  }
  // Masks the tile if the bounds cut it. Returns true if they do.
  CUTE_DEVICE static bool mask(const auto& item, int tile, const auto& at, auto&& scores) {
    const bool needed = item.own.needs_mask(tile);
    if (needed) Mask::of_bounds(at(tile)).apply(scores);
    return needed;
  }
};

// The full and partial tiles of a custom mask, as announced (mask_tile_pipeline.cuh). An
// announcement is read a tile ahead, so the bits of a partial tile have a step's time to arrive.
template <class Traits>
struct MaskTilesOfItem {
  using Mask = TileMask<Traits>;

  MaskTile tile = {};   // the step's
  Mask tile_mask = {};  // unless it is whole
  MaskTileConsumer<ConsumerPipelineState<Traits::kTileSlots>> reader = {};
  MaskTile ahead = {};  // the next one
  typename Mask::RawBits ahead_bits = {};

  struct First {};

  CUTE_DEVICE First look_ahead(const auto& item, const auto& at) {
    if (!item.any()) return {};
    ahead = reader.take(at.smem());
    if (!ahead.is_full()) ahead_bits = Mask::read_bits(at(ahead.index()));
    return {};
  }
  CUTE_DEVICE void begin_step() { tile = ahead; }
  CUTE_DEVICE void meanwhile(const auto& item, const auto& at) {
    if (!tile.is_full()) {
      // The bounds apply only where they cut the tile.
      tile_mask = item.own.needs_mask(tile.index())
                      ? Mask::of_bits_and_bounds(at(tile.index()), ahead_bits)
                      : Mask::of_bits(ahead_bits);
    }
    if (!tile.is_last()) look_ahead(item, at);
  }

  CUTE_DEVICE int first(const auto&) const { return tile.index(); }
  CUTE_DEVICE bool is_last(const auto&, int) const { return tile.is_last(); }
  // The next item is announced only after an item's last tile.
  CUTE_DEVICE bool prepares_in_first_step(const auto&) const { return tile.is_last(); }
  CUTE_DEVICE void for_others(const auto& item, const auto& at, const auto& step,
                              const auto& prepare) {
    if (tile.is_last()) return;
    for (begin_step(); !tile.is_last(); begin_step()) {
      step(tile.index(), [&] { meanwhile(item, at); });
    }
    step(tile.index(), [&] {
      meanwhile(item, at);
      prepare();
    });
  }

  CUTE_DEVICE void mask_first(const auto&, const First&, auto&& scores) const {
    if (!tile.is_full()) tile_mask.apply(scores);
  }
  CUTE_DEVICE void mask(const auto& item, int, const auto&, auto&& scores) const {
    mask_first(item, {}, scores);
  }
};

template <class Traits>
using TilesOf = conditional_t<Traits::kHasMaskBits, MaskTilesOfItem<Traits>, DenseTiles<Traits>>;

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

// Skipped tiles: where the caller asks for it, a warpgroup computes the scores of a tile but not P
// and O += P V if all weights in its rows are small (running_maxima.cuh). All its threads decide
// together, because they share products; for all others the tile is like any.
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
