// The producer warpgroup: work items, Q, and the K/V tiles of each, last tile first.
//
//   produce_boxes: ragged tensors and pages of 8 n rows, by TMA. One warp announces the items and
//     fetches Q and K, another one V; in each, one lane issues boxes while the other lanes look up
//     the page of one box each, a tile ahead.
//   produce_rows: any other page size, page 1 above all, by cp.async. All four warps copy rows of K
//     and V in turn; each lane looks up the page of one or two rows, a tile ahead.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// Work item `index` and what its consumers need to know.
template <class Traits>
__device__ __forceinline__ ItemState describe_item(const HopperParams& params, int index) {
  ItemState state;
  state.item = params.items[index];
  state.request = params.requests[state.item.request];
  const RequestInfo& request = state.request;
  MaskBounds bounds{request.qo_len, request.kv_len, params.window_left, params.causal};

  state.num_rows =
      min(request.qo_len * params.group_size - state.item.row_begin, params.rows_per_tile);
  RowSpan rows{unpack_row(params, state.item.row_begin).token,
               unpack_row(params, state.item.row_begin + state.num_rows - 1).token};
  KeySpan chunk{state.item.chunk * request.chunk_keys, request.kv_len};
  if (request.kv_len - chunk.begin > request.chunk_keys) {
    chunk.end = chunk.begin + request.chunk_keys;
  }
  state.tiles = touched_tiles(bounds, rows, chunk, Traits::kTileN, Mask::kBounds);
  state.keys = {touched_keys(bounds, rows).begin, request.kv_len};
  return state;
}

// Q of an item: whole tokens as one box per 64 columns; where a group exceeds the tile, row by row.
template <class Traits>
__device__ __forceinline__ void fetch_q(const HopperParams& params, const ItemState& state,
                                        SharedStorage<Traits>& smem) {
  constexpr int kBlockElements = Traits::kTileM * kBlockColumns;
  const BoxShape& box = params.box;
  int box_rows = box.q_heads * box.q_tokens;
  int num_boxes = params.group_size <= Traits::kTileM ? 1 : state.num_rows;
  smem.barriers.q_full.arrive_and_expect_tx(num_boxes * box_rows * kBlockRowBytes *
                                            Traits::kBlocksQk);
  for (int i = 0; i < num_boxes; ++i) {
    PackedRow row = unpack_row(params, state.item.row_begin + i);
    for (int block = 0; block < Traits::kBlocksQk; ++block) {
      SM90_TMA_LOAD_4D::copy(&params.maps.q, reinterpret_cast<std::uint64_t*>(&smem.barriers.q_full),
                             static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_FIRST),
                             smem.q + block * kBlockElements + i * kBlockColumns,
                             block * kBlockColumns, row.head_in_group,
                             state.request.qo_begin + row.token, state.item.kv_head);
    }
  }
}

// Tells the consumers about an item and fetches its Q, by one thread.
template <class Traits>
struct ItemAnnouncer {
  const HopperParams& params;
  SharedStorage<Traits>& smem;
  RingPosition<kItemSlots> item;
  RingPosition<1> q;

  __device__ __forceinline__ void announce(const ItemState& state) {
    auto& barriers = smem.barriers;
    barriers.item_empty[item.index].wait(item.phase ^ 1);
    smem.items[item.index] = state;
    barriers.item_full[item.index].arrive();
    item.advance();
    if (state.tiles.count() == 0) return;
    barriers.q_empty.wait(q.phase ^ 1);
    q.advance();
    fetch_q(params, state, smem);
  }
};

enum class Operand { kK, kV };

// One operand's tiles as TMA boxes, by one warp.
template <class Traits, Operand kOperand>
struct BoxLoader {
  static constexpr int kHeadDim = kOperand == Operand::kK ? Traits::kHeadQk : Traits::kHeadVo;
  static constexpr int kBlocks = kHeadDim / kBlockColumns;
  static constexpr int kTileElements = Traits::kTileN * kHeadDim;
  static constexpr int kMostBoxes = Traits::kTileN / 8;
  static_assert(kMostBoxes <= 32, "a lane looks up each");

  // Where box lane_id() of a tile lies (tensor_map.h).
  struct Place {
    int page;
    int x;
    int r;
  };

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  RequestInfo request;
  KeySpan keys;
  int kv_head;
  RingPosition<Traits::kStages> at;

  __device__ __forceinline__ BoxLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  __device__ __forceinline__ void load_item(const ItemState& state) {
    request = state.request;
    keys = state.keys;
    kv_head = state.item.kv_head;
    if (state.tiles.count() == 0) return;
    Place place = find(state.tiles.end - 1);
    for (int tile = state.tiles.end - 1; tile >= state.tiles.begin; --tile) {
      Place next = tile > state.tiles.begin ? find(tile - 1) : Place{};
      empty(at.index).wait(at.phase ^ 1);
      fetch(place);
      at.advance();
      place = next;
    }
  }

 private:
  __device__ __forceinline__ Barrier& empty(int stage) const {
    return kOperand == Operand::kK ? smem.barriers.k_empty[stage] : smem.barriers.v_empty[stage];
  }

  // The rows that are fetched are those of kept keys: what lies below a window may have been
  // recycled, page and all, and what lies past the request's end is not its own.
  __device__ __forceinline__ Place find(int tile) const {
    int box_rows = params.box.kv_rows;
    int box_key = tile * Traits::kTileN + lane_id() * box_rows;
    int first = max(keys.begin, box_key);
    int num_rows = max(min(keys.end, box_key + box_rows) - first, 0);
    Place place{0, 0, num_rows - box_rows};
    if (num_rows == 0 || lane_id() * box_rows >= Traits::kTileN) return place;
    if (params.page_indices == nullptr) {
      place.x = request.kv_begin + first;
    } else {
      int page;
      params.page(page, place.x, first);
      place.page = __ldg(params.page_indices + request.kv_begin + page);
    }
    return place;
  }

  __device__ __forceinline__ void fetch(const Place& place) const {
    BytesBarrier& full = kOperand == Operand::kK ? smem.barriers.k_full[at.index]
                                                 : smem.barriers.v_full[at.index];
    // NOTE: elect_one_sync() tells the compiler that one lane issues; `lane == 0` would not.
    if (elect_one_sync()) full.arrive_and_expect_tx(kTileElements * sizeof(typename Traits::Element));
    auto* tile = (kOperand == Operand::kK ? smem.k : smem.v) + at.index * kTileElements;
    int box_rows = params.box.kv_rows;
    if (box_rows == Traits::kTileN) {
      issue(place, 0, tile, full);
      return;
    }
    // In groups, so that one box's way to the uniform registers hides another's.
    constexpr int kGroup = kMostBoxes % 4 == 0 ? 4 : 2;
    for (int box = 0; box * box_rows < Traits::kTileN; box += kGroup) {
      CUTE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        int row = (box + i) * box_rows;
        if (row < Traits::kTileN) issue(place, box + i, tile + row * kBlockColumns, full);
      }
    }
  }

  __device__ __forceinline__ void issue(const Place& place, int box,
                                        typename Traits::Element* target,
                                        BytesBarrier& full) const {
    const CUtensorMap* map = kOperand == Operand::kK ? &params.maps.k : &params.maps.v;
    int page = __shfl_sync(0xffffffffu, place.page, box);
    int x = __shfl_sync(0xffffffffu, place.x, box);
    int r = __shfl_sync(0xffffffffu, place.r, box);
    if (elect_one_sync()) {
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                               static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
                               target + block * (Traits::kTileN * kBlockColumns),
                               block * kBlockColumns, r, x, kv_head, page);
      }
    }
  }
};

// Both operands' tiles row by row, by all threads of the warpgroup.
template <class Traits>
struct RowLoader {
  static constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;  // rows that a warp copies
  static constexpr int kOwned = ceil_div(kWarpKeys, 32);              // rows that a lane looks up
  static constexpr int kRowsPerPass = 4;                              // 8 lanes, 16 bytes each
  static_assert(kWarpKeys % kRowsPerPass == 0);

  struct Places {
    KeySlot slot[kOwned];
    int tile;
  };

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  RequestInfo request;
  KeySpan keys;
  int kv_head;
  RingPosition<Traits::kStages> k;
  RingPosition<Traits::kStages> v;
  BytesBarrier* unpublished = nullptr;  // its rows are in flight

  __device__ __forceinline__ RowLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  // K(last), then K(t - 1), V(t) for each tile: the order in which S(t - 1) = Q K^T runs ahead of
  // O += P V(t).
  __device__ __forceinline__ void load_item(const ItemState& state) {
    request = state.request;
    keys = state.keys;
    kv_head = state.item.kv_head;
    const TileRange tiles = state.tiles;
    if (tiles.count() == 0) {
      // The next wait may be for consumers who wait for what is still in flight.
      drain();
      return;
    }
    Places places = find(tiles.end - 1);
    fetch_k(places);
    for (int tile = tiles.end - 2; tile >= tiles.begin; --tile) {
      Places next = find(tile);
      fetch_k(next);
      fetch_v(places);
      places = next;
    }
    fetch_v(places);
  }

  __device__ __forceinline__ void drain() {
    cp_async_wait<0>();
    publish();
  }

 private:
  __device__ __forceinline__ static int warp_row() { return threadIdx.x / 32 * kWarpKeys; }

  __device__ __forceinline__ Places find(int tile) const {
    Places places;
    places.tile = tile;
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      int key = tile * Traits::kTileN + warp_row() + i * 32 + lane_id();
      places.slot[i] = find_slot(params, request.kv_begin, max(min(key, keys.end - 1), keys.begin));
    }
    return places;
  }

  __device__ __forceinline__ void fetch_k(const Places& places) {
    smem.barriers.k_empty[k.index].wait(k.phase ^ 1);
    fetch<Traits::kBlocksQk>(places, params.k, params.head_dim_qk,
                             smem.k + k.index * (Traits::kTileN * Traits::kHeadQk));
    publish_before(smem.barriers.k_full[k.index]);
    k.advance();
  }
  __device__ __forceinline__ void fetch_v(const Places& places) {
    smem.barriers.v_empty[v.index].wait(v.phase ^ 1);
    fetch<Traits::kBlocksVo>(places, params.v, params.head_dim_vo,
                             smem.v + v.index * (Traits::kTileN * Traits::kHeadVo));
    publish_before(smem.barriers.v_full[v.index]);
    v.advance();
  }

  // One tile stays in flight while the one before it is announced.
  __device__ __forceinline__ void publish_before(BytesBarrier& full) {
    cp_async_fence();
    cp_async_wait<1>();
    publish();
    unpublished = &full;
  }
  // NOTE: cp.async writes through the generic proxy and wgmma reads through the async one.
  __device__ __forceinline__ void publish() {
    if (unpublished == nullptr) return;
    cutlass::arch::fence_view_async_shared();
    unpublished->arrive();
    unpublished = nullptr;
  }

  template <int kBlocks>
  __device__ __forceinline__ void fetch(const Places& places, const KvTensor& tensor, int head_dim,
                                        typename Traits::Element* tile) const {
    using Element = typename Traits::Element;
    std::int64_t offsets[kOwned];
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) offsets[i] = slot_offset(tensor, places.slot[i]);
    int column = lane_id() % 8 * 8;
    auto* head = static_cast<const Element*>(tensor.data) + kv_head * tensor.stride_head + column;
    int row = warp_row() + lane_id() / 8;
    int key = places.tile * Traits::kTileN + row;
    CUTE_UNROLL
    for (int pass = 0; pass < kWarpKeys / kRowsPerPass; ++pass) {
      constexpr int kPassesPerOwned = 32 / kRowsPerPass;
      std::int64_t offset =
          __shfl_sync(0xffffffffu, offsets[pass / kPassesPerOwned],
                      pass % kPassesPerOwned * kRowsPerPass + lane_id() / 8);
      int pass_row = row + pass * kRowsPerPass;
      int pass_key = key + pass * kRowsPerPass;
      bool kept = pass_key >= keys.begin && pass_key < keys.end;
      std::uint32_t target = cast_smem_ptr_to_uint(tile) + pass_row * kBlockRowBytes +
                             (lane_id() % 8 ^ pass_row % 8) * 16;
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        // NOTE: with 0 source bytes nothing is read; the address need not be mapped.
        int bytes = kept && block * kBlockColumns + column < head_dim ? 16 : 0;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                         target + block * Traits::kTileN * kBlockRowBytes),
                     "l"(head + offset + block * kBlockColumns), "r"(bytes));
      }
    }
  }
};

// One CTA's share of the work list, by warps 0 and 1 of the warpgroup.
template <class Traits>
__device__ __forceinline__ void produce_boxes(const HopperParams& params,
                                              SharedStorage<Traits>& smem, int begin, int end) {
  int warp = cutlass::canonical_warp_idx_sync();
  if (warp == 0) {
    ItemAnnouncer<Traits> announcer{params, smem};
    BoxLoader<Traits, Operand::kK> loader(params, smem);
    for (int index = begin; index < end; ++index) {
      ItemState state = describe_item<Traits>(params, index);
      if (elect_one_sync()) announcer.announce(state);
      __syncwarp();
      loader.load_item(state);
    }
  } else if (warp == 1) {
    BoxLoader<Traits, Operand::kV> loader(params, smem);
    for (int index = begin; index < end; ++index) {
      loader.load_item(describe_item<Traits>(params, index));
    }
  }
}

// The same by the whole warpgroup.
template <class Traits>
__device__ __forceinline__ void produce_rows(const HopperParams& params,
                                             SharedStorage<Traits>& smem, int begin, int end) {
  ItemAnnouncer<Traits> announcer{params, smem};
  RowLoader<Traits> loader(params, smem);
  for (int index = begin; index < end; ++index) {
    ItemState state = describe_item<Traits>(params, index);
    if (threadIdx.x == 0) announcer.announce(state);
    __syncwarp();
    loader.load_item(state);
  }
  loader.drain();
}

}  // namespace preflash::sm90
