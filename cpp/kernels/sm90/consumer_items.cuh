// The work items as one consumer warpgroup sees them: those that work_items.cuh announces, with the
// tiles that its own rows touch.
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ConsumerItem : ItemOf<Traits::kSegments> {
  int slot = 0;           // of smem.items
  TileRange own;          // the tiles that this warpgroup's rows touch
  int skipped_first = 0;  // tiles before them, in the order of the loop: last tile first
  int skipped_last = 0;   // tiles after them

  __device__ __forceinline__ bool any() const { return own.count() > 0; }
  __device__ __forceinline__ int next_slot() const { return slot + 1 == kItemSlots ? 0 : slot + 1; }
};

template <class Traits>
struct ConsumerItems {
  SharedStorage<Traits>& smem;
  int warpgroup;  // among consumers
  std::uint32_t phase = 0;

  // Waits for the item in `slot`. An item without tiles ends the work list.
  __device__ __forceinline__ ConsumerItem<Traits> wait(int slot) {
    smem.barriers.item_full[slot].wait(phase);
    order_memory_accesses();
    if (slot == kItemSlots - 1) phase ^= 1;
    const ItemState& state = smem.items[slot];
    const TileRange& own = state.warpgroup_tiles[warpgroup];
    int begin = warp_uniform(state.tiles.begin);
    int end = warp_uniform(state.tiles.end);
    ConsumerItem<Traits> item;
    item.slot = slot;
    if (begin == end) return item;
    if constexpr (Traits::kSegments > 1) {
      item.segment = warp_uniform(state.request.segment);
      item.rests = warp_uniform(state.num_rows) <= warpgroup * kWarpgroupRows;
      if (item.rests) {
        item.own = {begin, begin, end, end};
        return item;
      }
    }
    item.own = {warp_uniform(own.begin), warp_uniform(own.full_begin), warp_uniform(own.full_end),
                warp_uniform(own.end)};
    if constexpr (Traits::kSkipsTiles) {
      item.skipped_first = end - item.own.end;
      item.skipped_last = item.own.begin - begin;
    }
    return item;
  }
};

}  // namespace preflash::sm90
