// A CTA's work items: one producer warp prepares and announces them ahead of time, all others read.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "kernels/common/item_timer.cuh"
#include "kernels/sm90/forward_epilogue.cuh"

namespace preflash::sm90 {

// A CTA's items. The CTAs of a cluster share a list.
template <class Traits>
CUTE_DEVICE int2 items_of_cta(const auto& params) {
  int list = static_cast<int>(blockIdx.x) / Traits::kClusterSize;
  if (params.cta_begin == nullptr) return {list, list + 1};
  return {__ldg(params.cta_begin + list), __ldg(params.cta_begin + list + 1)};
}

// True if the first tile of keys of a whole query tile comes before `tiles`, the tiles of an item
// with fewer rows. A decode step is causal, whatever its plan says.
CUTE_DEVICE bool begins_late(const ItemView& item, const QueryRows& rows, const TileRange& tiles,
                             int tile_keys) {
  const auto& [params, work_item, request, num_rows] = item;
  const bool causal = item.bounds().causal || request.qo_len == 1;
  if (params.aligned_chunk_tiles == 0 || !causal) return false;
  const int last_token = (rows.tile_end - 1) / params.group_size;
  const int end = ceil_div(request.kv_len - request.qo_len + last_token + 1, tile_keys);
  return tiles.end < min(end, (work_item.chunk + 1) * params.aligned_chunk_tiles);
}

CUTE_DEVICE KeySpan keys_of_item(const ItemView& item) {
  const int first_token = item.packed(0).token;
  return {item.bounds().first_key(first_token), item.request.kv_len};
}

// The KV tiles that tokens of an item touch.
template <class Traits>
CUTE_DEVICE TileRange tiles_of_tokens(const ItemView& item, RowSpan tokens) {
  return touched_tiles(item.bounds(), tokens,
                       chunk_of(item.item, item.request, item.params.chunk_origin),
                       Traits::kItemTileN, Mask::kBounds);
}
// The KV tiles that rows [first, end) of an item touch.
template <class Traits>
CUTE_DEVICE TileRange tiles_of_rows(const ItemView& item, int first, int end) {
  return tiles_of_tokens<Traits>(item, {item.packed(first).token, item.packed(end - 1).token});
}

// The KV tiles that the rows of one consumer warpgroup touch: if none, that of the item's
// highest keys, which is masked as a whole and gives zeros.
template <class Traits>
CUTE_DEVICE TileRange tiles_of_warpgroup(const ItemView& item, const TileRange& of_item,
                                         int warpgroup) {
  if constexpr (!Traits::kSkipsTiles) return of_item;
  int first = warpgroup * kWarpgroupRows;
  int end = min(first + kWarpgroupRows, item.num_rows);
  if (first < end) {
    TileRange tiles = tiles_of_rows<Traits>(item, first, end);
    if (tiles.count() > 0) return tiles;
  }
  int last = of_item.end - 1;
  return {last, last, last, last + 1};
}

// One warp prepares and announces the items. It writes the output of items without keys itself.
template <class Traits>
struct ItemProducer {
  const ParamsOf<Traits>& params;
  SharedStorage<Traits>& smem;
  int index;
  int end;
  ProducerPipelineState<kItemSlots> write = {};

  // Announces the next item, or an item without tiles at the end of the work list.
  CUTE_DEVICE void announce_item() {
    announce([](const ItemView&, const TileRange& tiles) { return tiles; });
  }
  // Tiles are announced only with mask bits (MaskTileProducer).
  CUTE_DEVICE static constexpr bool has_tile() { return false; }
  CUTE_DEVICE static constexpr void announce_tile() {}

  CUTE_DEVICE bool done() const { return index > end; }

 protected:
  // kept(item, tiles): with mask bits, returns `tiles`, or none if all of them are empty.
  CUTE_DEVICE void announce(auto&& kept) {
    WorkItem item;
    RequestInfo request;
    TileRange tiles = {};
    QueryRows rows;
    for (; index < end; ++index) {
      item = params.items[index];
      request = params.request(item.request);
      const HopperSegment& segment = params.segment_of(request);
      // None where the plan was made for longer requests.
      rows = query_grid<Traits>(segment).rows(request, item.row_begin);
      if (rows.count <= 0) continue;
      item.row_begin = rows.begin;
      const ItemView view{segment, item, request, rows.count};
      if (query_grid<Traits>(segment).aligned) {
        tiles = tiles_of_tokens<Traits>(view, rows.tokens(segment.group_size));
      } else {
        tiles = tiles_of_rows<Traits>(view, 0, rows.count);
      }
      if constexpr (Traits::kHasMaskBits) tiles = kept(view, tiles);
      if (tiles.count() > 0) break;
      ItemTimer timer;
      timer.start();
      ForwardEpilogue<Traits>{view}.run_empty();
      if (lane_id() == 0) timer.stop(params, record(), item);
    }
    ++index;
    smem.barriers.item.empty[write.index()].wait(write.phase() ^ 1);
    ItemState& state = smem.items[write.index()];
    if (elect_one_sync()) {
      const HopperSegment& segment = params.segment_of(request);
      const ItemView view{segment, item, request, rows.count};
      state.item = item;
      state.request = request;
      state.tiles = tiles;
      state.keys = keys_of_item(view);
      state.num_rows = rows.count;
      if constexpr (Traits::kAlignsQueryTiles) {
        state.begins_late = begins_late(view, rows, tiles, Traits::kItemTileN);
      }
      note_record(state, record() - Traits::kClusterSize);
#pragma unroll 1
      for (int w = 0; w < Traits::kConsumers; ++w) {
        state.warpgroup_tiles[w] =
            tiles_of_warpgroup<Traits>(ItemView::of(segment, state), state.tiles, w);
      }
      order_memory_accesses();
      smem.barriers.item.full[write.index()].arrive();
    }
    __syncwarp();
    write.advance();
  }

 private:
  // Index of the record of the item at `index`: each CTA that shares the item has its own record.
  CUTE_DEVICE int record() const { return index * Traits::kClusterSize + cta_rank<Traits>(); }
};

// A loading warp reads the CTA's items through this.
template <class Traits>
struct ItemReader {
  SharedStorage<Traits>& smem;
  ProducerPipelineState<kItemSlots> read = {};

  // Waits for the next item; null at the end of the work list.
  CUTE_DEVICE const ItemState* wait() const {
    smem.barriers.item.full[read.index()].wait(read.phase());
    order_memory_accesses();
    const ItemState& state = smem.items[read.index()];
    return warp_uniform(state.tiles.count()) > 0 ? &state : nullptr;
  }
  CUTE_DEVICE void release() {
    order_memory_accesses();
    smem.barriers.item.empty[read.index()].arrive();
    read.advance();
  }
};

}  // namespace preflash::sm90
