// The tiles of keys of an item as a consumer warpgroup goes through them, from the highest down,
// and their masks: policies, of which MaskOf is the variant's. at(tile): coordinates of an item's
// tile.
//   look_ahead()   the item comes next: returns an argument of apply()
//   take_first()   the item begins; returns its first tile
//   begin()        while the products of the first step run; returns true if this step also
//   prepares
//                  the transition to the next item
//   for_others()   the item's other steps: step(tile, work to do while the products run)
//   apply()        masks the scores of the first tile, or of a later one
//   skips()        P V of the latest tile is left out
#pragma once

#include "kernels/common/running_maxima.cuh"
#include "kernels/sm90/tile_ring.cuh"

namespace preflash::sm90 {

// All tiles in which a row of the warpgroup may see a key, by length, causal and window.
template <class Traits>
struct BoundsMask {
  using Mask = TileMask<Traits>;

  // State of an item's first step.
  struct Ahead {
    Mask mask = {};
  };

  CUTE_DEVICE static Ahead look_ahead(const auto& item, const auto& at) {
    if (!item.any() || !item.own.needs_mask(take_first(item))) return {};
    return {Mask::of_bounds(at(take_first(item)))};
  }
  CUTE_DEVICE static int take_first(const auto& item) { return item.own.end - 1; }
  CUTE_DEVICE static bool begin(const auto& item, const auto&) {
    return !Traits::kPreparesInLastStep || item.own.count() == 1;
  }
  CUTE_DEVICE static bool is_last(const auto& item, int tile) { return tile == item.own.begin; }
  CUTE_DEVICE static void for_others(const auto& item, const auto&, const auto& step,
                                     const auto& prepare) {
    int tile = take_first(item) - 1;
    for (; tile >= item.own.begin + Traits::kPreparesInLastStep; --tile) step(tile, [] {});
    if (Traits::kPreparesInLastStep && tile >= item.own.begin) step(tile, prepare);
  }

  CUTE_DEVICE static void apply(const auto& item, int tile, const auto&, auto& mma,
                                const Ahead& ahead) {
    if (item.own.needs_mask(tile)) ahead.mask.apply(mma.rows_of_s());
  }
  // Returns true if the bounds cut the tile.
  CUTE_DEVICE static bool apply(const auto& item, int tile, const auto& at, auto& mma) {
    const bool needed = item.own.needs_mask(tile);
    if (needed) Mask::of_bounds(at(tile)).apply(mma.rows_of_s());
    return needed;
  }
  CUTE_DEVICE static constexpr bool skips() { return false; }
};

// The full and partial tiles of a custom mask, as announced (tile_ring.cuh). An
// announcement is read a tile ahead, so the bits of a partial tile have a step's time to arrive.
template <class Traits>
struct CustomMask {
  using Mask = TileMask<Traits>;

  MaskTile tile = {};   // the step's
  Mask tile_mask = {};  // of a partial tile
  ConsumerPipelineState<Traits::kTileSlots> read = {};
  MaskTile ahead = {};  // the next one
  typename Mask::RawBits ahead_bits = {};

  struct Ahead {};

  CUTE_DEVICE Ahead look_ahead(const auto& item, const auto& at) {
    if (!item.any()) return {};
    ahead = take_mask_tile(at.smem(), read);
    if (!ahead.is_full()) ahead_bits = Mask::read_bits(at(ahead.index()));
    return {};
  }
  CUTE_DEVICE int take_first(const auto&) { return (tile = ahead).index(); }
  CUTE_DEVICE bool begin(const auto& item, const auto& at) {
    prepare(item, at);
    return tile.is_last();  // the next item is announced only after an item's last tile
  }
  CUTE_DEVICE bool is_last(const auto&, int) const { return tile.is_last(); }
  CUTE_DEVICE void for_others(const auto& item, const auto& at, const auto& step,
                              const auto& prepare_next) {
    if (tile.is_last()) return;
    for (tile = ahead; !tile.is_last(); tile = ahead) {
      step(tile.index(), [&] { prepare(item, at); });
    }
    step(tile.index(), [&] {
      prepare(item, at);
      prepare_next();
    });
  }

  CUTE_DEVICE void apply(const auto&, int, const auto&, auto& mma, const auto&...) const {
    if (!tile.is_full()) tile_mask.apply(mma.rows_of_s());
  }
  CUTE_DEVICE static constexpr bool skips() { return false; }

 private:
  // Makes the mask of the step's tile, and reads the next announcement.
  CUTE_DEVICE void prepare(const auto& item, const auto& at) {
    if (!tile.is_full()) {
      // The bounds apply only where they cut the tile.
      tile_mask = item.own.needs_mask(tile.index())
                      ? Mask::of_bits_and_bounds(at(tile.index()), ahead_bits)
                      : Mask::of_bits(ahead_bits);
    }
    if (!tile.is_last()) look_ahead(item, at);
  }
};

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

// Skipped tiles: a warpgroup computes the scores of a tile but not P and O += P V if all weights in
// its rows are small (running_maxima.cuh). All its threads decide together, because they share
// products. An item's first tile is computed, and so is the last one: the transition to the next
// item contains its P V.
template <class Traits>
struct SkippingMask : BoundsMask<Traits> {
  using Base = BoundsMask<Traits>;

  RunningMaxima<2> maxima;
  bool skips_latest = false;

  CUTE_DEVICE void apply(const auto& item, int tile, const auto& at, auto& mma, const auto& ahead) {
    Base::apply(item, tile, at, mma, ahead);
    const ScoreCoordinates<Traits> first = at(tile);
    maxima = RunningMaxima<2>::of(first.params, first.request,
                                  [&](int r) { return first.row(r) < first.num_rows; });
    has_weight(mma.rows_of_s());
    skips_latest = false;
  }
  CUTE_DEVICE bool apply(const auto& item, int tile, const auto& at, auto& mma) {
    const bool masked = Base::apply(item, tile, at, mma);
    const bool stays = Base::is_last(item, tile);
    skips_latest = !any_of_warpgroup(has_weight(mma.rows_of_s()) || stays, at.warpgroup());
    return masked;
  }
  CUTE_DEVICE bool skips() const { return skips_latest; }

 private:
  // True if the tile has weight in one of this thread's rows.
  CUTE_DEVICE bool has_weight(const auto& scores) {
    float tile_max[2];
    SpeculativeSoftmax::maxima(scores, NoShift{}, tile_max);
    return maxima.take(tile_max);
  }
};

template <class Traits>
using MaskOf = conditional_t<Traits::kHasMaskBits, CustomMask<Traits>,
                             conditional_t<Traits::kVariant.sparsity == Sparsity::kSkipping,
                                           SkippingMask<Traits>, BoundsMask<Traits>>>;

}  // namespace preflash::sm90
