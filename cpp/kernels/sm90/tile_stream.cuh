// The KV tiles of one item as every loading warp takes them, from the highest keys down: TileStream
// is a dense range, or the full and partial tiles of a custom mask (mask_tile_pipeline.cuh).
#pragma once

#include "kernels/sm90/mask_tile_pipeline.cuh"

namespace preflash::sm90 {

// Comes after the tile of an item's lowest keys. It holds no key, so that looking it up is allowed.
inline constexpr int kNoTile = -1;

// All tiles that the bounds leave.
template <class Traits, class Announces>
struct DenseTileStream {
  int begin;
  int tile;

  CUTE_DEVICE DenseTileStream(SharedStorage<Traits>&, Announces&) {}

  CUTE_DEVICE int first(const ItemState& state) {
    begin = warp_uniform(state.tiles.begin);
    return tile = warp_uniform(state.tiles.end) - 1;
  }
  CUTE_DEVICE int next() { return tile = tile > begin ? tile - 1 : kNoTile; }
};

// The tiles that are announced. Announces: what this warp itself announces (forward_load.cuh).
template <class Traits, class Announces>
struct MaskTileStream {
  SharedStorage<Traits>& smem;
  Announces& announces;
  MaskTileConsumer<ProducerPipelineState<Traits::kTileSlots>> reader = {};
  bool is_last;  // the tile taken last

  CUTE_DEVICE MaskTileStream(SharedStorage<Traits>& smem, Announces& announces)
      : smem(smem), announces(announces) {}

  CUTE_DEVICE int first(const ItemState&) { return take(); }
  CUTE_DEVICE int next() { return is_last ? kNoTile : take(); }

 private:
  CUTE_DEVICE int take() {
    announces.announce_tile();
    MaskTile tile = reader.take(smem);
    is_last = tile.is_last();
    return tile.index();
  }
};

template <class Traits, class Announces>
using TileStream = conditional_t<Traits::kHasMaskBits, MaskTileStream<Traits, Announces>,
                                 DenseTileStream<Traits, Announces>>;

// Calls load(look_up(tile), is_first) for each tile of an item. The lookup runs a tile ahead.
CUTE_DEVICE void for_each_tile(auto& tiles, const ItemState& state, const auto& look_up,
                               const auto& load) {
  int tile = tiles.first(state);
  auto found = look_up(tile);
  for (bool is_first = true; tile != kNoTile; is_first = false) {
    const int next = tiles.next();
    auto ahead = look_up(next);
    load(found, is_first);
    tile = next;
    found = ahead;
  }
}

}  // namespace preflash::sm90
