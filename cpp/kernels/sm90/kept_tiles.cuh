// The pipeline of the KV tiles that a custom mask leaves. One producer warp announces each item's
// tiles, the last one first, as classed_tiles.cuh tells them; tiles of which no row keeps a key do
// not appear, so they are neither loaded nor multiplied.
//
// Loading warps and consumers read the announcements, each at its own pace.
#pragma once

#include "kernels/sm90/classed_tiles.cuh"
#include "kernels/sm90/work_items.cuh"

namespace preflash::sm90 {

// One warp announces items and the tiles that are kept of them: all tiles of an item before the
// next item. It writes the output of items that keep no key itself.
template <class Traits>
struct KeptTileProducer {
  const ParamsOf<Traits>& params;
  SharedStorage<Traits>& smem;
  ItemProducer<Traits> items;
  ProducerPipelineState<Traits::kTileSlots> write = {};
  ClassedTiles classed = {};  // of the item announced last
  int next = -1;  // its tile to announce next; before classed.tiles.begin: there is none

  __device__ __forceinline__ bool done() const { return items.done(); }

  __device__ __forceinline__ void announce_item() {
    items.announce([&](const WorkItem& item, const RequestInfo& request, const TileRange& tiles) {
      if (tiles.count() == 0) return tiles;
      classed = ClassedTiles::of<Traits>(params.segment_of(request), item, request, tiles);
      next = classed.last_kept_before(tiles.end);
      return has_tile() ? tiles : TileRange{};
    });
  }

  __device__ __forceinline__ bool has_tile() const { return next >= classed.tiles.begin; }

  __device__ __forceinline__ void announce_tile() {
    int word = next * 4 | (classed.is_whole(next) ? KeptTile::kWhole : 0);
    next = classed.last_kept_before(next);
    if (!has_tile()) word |= KeptTile::kLast;
    int slot = write.index();
    smem.kept.tile_empty[slot].wait(write.phase() ^ 1);
    if (elect_one_sync()) {
      smem.kept.tiles[slot] = {word};
      order_memory_accesses();
      smem.kept.tile_full[slot].arrive();
    }
    __syncwarp();
    write.advance();
  }
};

// How a warp follows.
template <class PipelineState>
struct KeptTileReader {
  PipelineState read = {};

  // Waits for the next tile.
  template <class Traits>
  __device__ __forceinline__ KeptTile take(SharedStorage<Traits>& smem) {
    int slot = read.index();
    smem.kept.tile_full[slot].wait(read.phase());
    order_memory_accesses();
    // NOTE: lane 0 gives the slot back behind the shuffle, when every lane has read it.
    KeptTile kept{warp_uniform(smem.kept.tiles[slot].word)};
    order_memory_accesses();
    if (lane_id() == 0) smem.kept.tile_empty[slot].arrive();
    read.advance();
    return kept;
  }
};

template <class Traits>
using KeptTileLoader = KeptTileReader<ProducerPipelineState<Traits::kTileSlots>>;

}  // namespace preflash::sm90
