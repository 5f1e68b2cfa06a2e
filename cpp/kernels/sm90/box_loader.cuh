// Q, and K and V where pages allow, by TMA.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

// Q of an item: whole tokens as one box per 64 columns; where a group exceeds the tile, row by row.
template <class Traits>
__device__ __forceinline__ void fetch_q(const HopperParams& params, const ItemState& state,
                                        SharedStorage<Traits>& smem, int stage) {
  constexpr int kBlockElements = Traits::kTileM * kBlockColumns;
  BytesBarrier& full = smem.barriers.q_full[stage];
  auto* q = smem.q + stage * (Traits::kTileM * Traits::kHeadQk);
  const BoxShape& box = params.box;
  int box_rows = box.q_heads * box.q_tokens;
  int num_boxes = params.group_size <= Traits::kTileM ? 1 : state.num_rows;
  full.arrive_and_expect_tx(num_boxes * box_rows * kBlockRowBytes * Traits::kBlocksQk);
  for (int i = 0; i < num_boxes; ++i) {
    PackedRow row = unpack_row(params, state.item.row_begin + i);
    for (int block = 0; block < Traits::kBlocksQk; ++block) {
      SM90_TMA_LOAD_4D::copy(&params.maps.q, reinterpret_cast<std::uint64_t*>(&full),
                             static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_FIRST),
                             q + block * kBlockElements + i * kBlockColumns, block * kBlockColumns,
                             row.head_in_group, state.request.qo_begin + row.token,
                             state.item.kv_head);
    }
  }
}

// Fetches Q, by one warp.
template <class Traits>
struct QLoader {
  const HopperParams& params;
  SharedStorage<Traits>& smem;
  ProducerRing<Traits::kQStages> at = {};

  __device__ __forceinline__ void load(const ItemState& state) {
    smem.barriers.q_empty[at.index()].wait(at.phase() ^ 1);
    if (elect_one_sync()) fetch_q(params, state, smem, at.index());
    __syncwarp();
    at.advance();
  }
};

enum class Operand { kK, kV };

// One operand's tiles as TMA boxes, by one warp.
template <class Traits, Operand kOperand>
struct BoxLoader {
  static constexpr int kHeadDim = kOperand == Operand::kK ? Traits::kHeadQk : Traits::kHeadVo;
  static constexpr int kBlocks = kHeadDim / kBlockColumns;
  static constexpr int kTileElements = Traits::kTileN * kHeadDim;
  static_assert(Traits::kMostBoxes <= 32, "a lane looks up each");

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  ItemKeys item;
  ProducerRing<Traits::kStages> at;

  __device__ __forceinline__ BoxLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  // Calls after_first() when the first tile is on its way.
  template <class AfterFirst>
  __device__ __forceinline__ void load_item(const ItemState& state, AfterFirst&& after_first) {
    item = ItemKeys::of(state);
    const int begin = warp_uniform(state.tiles.begin);
    const int first = warp_uniform(state.tiles.end) - 1;
    BoxPlace place = find(first);
    for (int tile = first; tile >= begin; --tile) {
      BoxPlace next = tile > begin ? find(tile - 1) : BoxPlace{};
      empty(at.index()).wait(at.phase() ^ 1);
      fetch(place);
      at.advance();
      place = next;
      if (tile == first) after_first();
    }
  }

 private:
  __device__ __forceinline__ Barrier& empty(int stage) const {
    return kOperand == Operand::kK ? smem.barriers.k_empty[stage] : smem.barriers.v_empty[stage];
  }

  // Of box lane_id(). The rows that are fetched are those of kept keys: what lies below a window
  // may have been recycled, page and all, and what lies past the request's end is not its own.
  __device__ __forceinline__ BoxPlace find(int tile) const {
    int box_rows = params.box.kv_rows;
    int box_key = tile * Traits::kTileN + lane_id() * box_rows;
    int first = max(item.keys.begin, box_key);
    int num_rows = max(min(item.keys.end, box_key + box_rows) - first, 0);
    BoxPlace place{0, 0, num_rows - box_rows};
    if (num_rows == 0 || lane_id() * box_rows >= Traits::kTileN) return place;
    if (params.page_indices == nullptr) {
      place.x = item.kv_begin + first;
    } else {
      int page;
      params.page(page, place.x, first);
      place.page = __ldg(params.page_indices + item.kv_begin + page);
    }
    return place;
  }

  // NOTE: elect_one_sync() tells the compiler that one lane issues; `lane == 0` would not.
  __device__ __forceinline__ void fetch(const BoxPlace& place) const {
    BytesBarrier& full = kOperand == Operand::kK ? smem.barriers.k_full[at.index()]
                                                 : smem.barriers.v_full[at.index()];
    auto* tile = (kOperand == Operand::kK ? smem.k : smem.v) + at.index() * kTileElements;
    const int box_rows = params.box.kv_rows;
    if (box_rows == Traits::kTileN) {
      BoxPlace only{warp_uniform(place.page), warp_uniform(place.x), warp_uniform(place.r)};
      if (elect_one_sync()) {
        full.arrive_and_expect_tx(kTileElements * sizeof(typename Traits::Element));
        issue(only, tile, full);
      }
      __syncwarp();
      return;
    }
    BoxPlace* places = kOperand == Operand::kK ? smem.k_places : smem.v_places;
    if (lane_id() < Traits::kMostBoxes) places[lane_id()] = place;
    __syncwarp();
    if (elect_one_sync()) {
      full.arrive_and_expect_tx(kTileElements * sizeof(typename Traits::Element));
      // In groups, so that one box's way to the uniform registers hides another's.
      constexpr int kGroup = 4;
      static_assert(Traits::kMostBoxes % kGroup == 0);
      for (int box = 0; box * box_rows < Traits::kTileN; box += kGroup) {
        BoxPlace group[kGroup];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) group[i] = places[box + i];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          int row = (box + i) * box_rows;
          if (row < Traits::kTileN) issue(group[i], tile + row * kBlockColumns, full);
        }
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void issue(const BoxPlace& place, typename Traits::Element* target,
                                        BytesBarrier& full) const {
    const CUtensorMap* map = kOperand == Operand::kK ? &params.maps.k : &params.maps.v;
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                             static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
                             target + block * (Traits::kTileN * kBlockColumns),
                             block * kBlockColumns, place.r, place.x, item.kv_head, place.page);
    }
  }
};

}  // namespace preflash::sm90
