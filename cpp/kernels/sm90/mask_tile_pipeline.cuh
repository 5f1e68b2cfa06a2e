// The pipeline of the full and partial KV tiles of a custom mask. One producer warp announces them,
// from an item's highest keys down; loading warps and consumers read that, each at its own pace.
#pragma once

#include "kernels/sm90/mask_tile_reader.cuh"
#include "kernels/sm90/work_items.cuh"

namespace preflash::sm90 {

// One warp announces items and their tiles: all tiles of an item before the next item.
template <class Traits>
struct MaskTileProducer : ItemProducer<Traits> {
  ProducerPipelineState<Traits::kTileSlots> tile_write = {};
  MaskTileReader reader = {};  // of the item announced last
  int next = -1;  // its tile to announce next; before reader.tiles.begin: there is none

  CUTE_DEVICE void announce_item() {
    this->announce([&](const WorkItem& item, const RequestInfo& request, const TileRange& tiles) {
      if (tiles.count() == 0) return tiles;
      reader = MaskTileReader::of<Traits>(this->params.segment_of(request), item, request, tiles);
      next = reader.last_kept_before(tiles.end);
      return has_tile() ? tiles : TileRange{};
    });
  }

  CUTE_DEVICE bool has_tile() const { return next >= reader.tiles.begin; }

  CUTE_DEVICE void announce_tile() {
    auto& kept = this->smem.kept;
    int word = next * 4 | (reader.is_full(next) ? MaskTile::kFull : 0);
    next = reader.last_kept_before(next);
    if (!has_tile()) word |= MaskTile::kLast;
    int slot = tile_write.index();
    kept.ring.empty[slot].wait(tile_write.phase() ^ 1);
    if (elect_one_sync()) {
      kept.tiles[slot] = {word};
      order_memory_accesses();
      kept.ring.full[slot].arrive();
    }
    __syncwarp();
    tile_write.advance();
  }
};

template <class PipelineState>
struct MaskTileConsumer {
  PipelineState read = {};

  // Waits for the next tile.
  template <class Traits>
  CUTE_DEVICE MaskTile take(SharedStorage<Traits>& smem) {
    int slot = read.index();
    smem.kept.ring.full[slot].wait(read.phase());
    order_memory_accesses();
    MaskTile kept{warp_uniform(smem.kept.tiles[slot].word)};
    // NOTE: lane 0 releases the slot after every lane's read: a shuffle orders no memory accesses,
    // __syncwarp() does.
    __syncwarp();
    release(smem.kept.ring.empty[slot]);
    read.advance();
    return kept;
  }
};

}  // namespace preflash::sm90
