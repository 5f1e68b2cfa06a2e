// The tiles of keys of an item as a consumer warpgroup goes through them, the last one first:
// policies, of which TilesOf is the variant's. at(tile): the coordinates of a tile of the item.
//   look_ahead(item)    the item comes next: what mask_first() takes, made ahead of time
//   begin_step()        the tile that was looked ahead to is the step's
//   meanwhile(item)     while the products of an item's first step run
//   for_others(step)    the item's steps behind its first one: step(tile, work beside the products)
#pragma once

#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/kept_tiles.cuh"

namespace preflash::sm90 {

// All tiles in which a row of the warpgroup may see a key, by length, causal and window.
template <class Traits>
struct DenseTiles {
  using Mask = TileMask<Traits>;

  // What an item's first step needs ahead of time.
  struct First {
    Mask mask = {};
  };

  template <class Item, class At>
  __device__ __forceinline__ static First look_ahead(const Item& item, const At& at) {
    if (!item.any() || !item.own.needs_mask(first(item))) return {};
    return {Mask::of_bounds(at(first(item)))};
  }
  __device__ __forceinline__ static void begin_step() {}
  template <class Item, class At>
  __device__ __forceinline__ static void meanwhile(const Item&, const At&) {}

  template <class Item>
  __device__ __forceinline__ static int first(const Item& item) {
    return item.own.end - 1;
  }
  template <class Item>
  __device__ __forceinline__ static bool is_last(const Item& item, int tile) {
    return tile == item.own.begin;
  }
  // Whether an item's first step prepares the transition to the next item.
  template <class Item>
  __device__ __forceinline__ static bool prepares_in_first_step(const Item& item) {
    return !Traits::kPreparesInLastStep || item.own.count() == 1;
  }
  template <class Item, class At, class Step, class Prepare>
  __device__ __forceinline__ static void for_others(const Item& item, const At&, const Step& step,
                                                    const Prepare& prepare) {
    int tile = first(item) - 1;
    for (; tile >= item.own.begin + Traits::kPreparesInLastStep; --tile) step(tile, [] {});
    if (Traits::kPreparesInLastStep && tile >= item.own.begin) step(tile, prepare);
  }

  template <class Item, class Scores>
  __device__ __forceinline__ static void mask_first(const Item& item, const First& ahead,
                                                    Scores&& scores) {
    if (item.own.needs_mask(first(item))) ahead.mask.apply(scores);
  }
  // Whether the tile is masked.
  template <class Item, class At, class Scores>
  __device__ __forceinline__ static bool mask(const Item& item, int tile, const At& at,
                                              Scores&& scores) {
    const bool needed = item.own.needs_mask(tile);
    if (needed) Mask::of_bounds(at(tile)).apply(scores);
    return needed;
  }
};

// The full and partial tiles of a custom mask, as announced (kept_tiles.cuh). An announcement is
// read a tile ahead, so the bits of a partial tile have a step's time to arrive.
template <class Traits>
struct KeptTilesInTurn {
  using Mask = TileMask<Traits>;

  KeptTile tile = {};   // the step's
  Mask tile_mask = {};  // unless it is whole
  KeptTileReader<ConsumerPipelineState<Traits::kTileSlots>> reader = {};
  KeptTile ahead = {};  // the next one
  typename Mask::RawBits ahead_bits = {};

  struct First {};

  template <class Item, class At>
  __device__ __forceinline__ First look_ahead(const Item& item, const At& at) {
    if (!item.any()) return {};
    ahead = reader.take(at.smem());
    if (!ahead.is_whole()) ahead_bits = Mask::read_bits(at(ahead.index()));
    return {};
  }
  __device__ __forceinline__ void begin_step() { tile = ahead; }
  template <class Item, class At>
  __device__ __forceinline__ void meanwhile(const Item& item, const At& at) {
    if (!tile.is_whole()) {
      // The bounds apply only where they cut the tile.
      tile_mask = item.own.needs_mask(tile.index())
                      ? Mask::of_bits_and_bounds(at(tile.index()), ahead_bits)
                      : Mask::of_bits(ahead_bits);
    }
    if (!tile.is_last()) look_ahead(item, at);
  }

  template <class Item>
  __device__ __forceinline__ int first(const Item&) const {
    return tile.index();
  }
  template <class Item>
  __device__ __forceinline__ bool is_last(const Item&, int) const {
    return tile.is_last();
  }
  // The next item is announced only behind an item's last tile.
  template <class Item>
  __device__ __forceinline__ bool prepares_in_first_step(const Item&) const {
    return tile.is_last();
  }
  template <class Item, class At, class Step, class Prepare>
  __device__ __forceinline__ void for_others(const Item& item, const At& at, const Step& step,
                                             const Prepare& prepare) {
    if (tile.is_last()) return;
    for (begin_step(); !tile.is_last(); begin_step()) {
      step(tile.index(), [&] { meanwhile(item, at); });
    }
    step(tile.index(), [&] {
      meanwhile(item, at);
      prepare();
    });
  }

  template <class Item, class Scores>
  __device__ __forceinline__ void mask_first(const Item&, const First&, Scores&& scores) const {
    if (!tile.is_whole()) tile_mask.apply(scores);
  }
  template <class Item, class At, class Scores>
  __device__ __forceinline__ void mask(const Item& item, int, const At&, Scores&& scores) const {
    mask_first(item, {}, scores);
  }
};

template <class Traits>
using TilesOf = conditional_t<Traits::kHasMaskBits, KeptTilesInTurn<Traits>, DenseTiles<Traits>>;

}  // namespace preflash::sm90
