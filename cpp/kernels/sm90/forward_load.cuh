// The producer warpgroup: work items, Q, and the K/V tiles of each, last tile first.
//
// Order of the fetches: Q, K(last), then K(t - 1), V(t) for each tile: the order in which the
// consumers' S(t - 1) = Q K^T runs ahead of O += P V(t).
//
//   TileLoader = BoxLoader: ragged tensors and pages of 8 n rows. One warp, one of its lanes issues
//     TMA boxes; the other lanes look up the page of one box each, a tile ahead.
//   TileLoader = RowLoader: any other page size, page 1 above all. All four warps copy rows by
//     cp.async; each lane looks up the page of one or two rows, a tile ahead.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// Barrier phases and ring positions of the producers.
template <class Traits>
struct ProducerState {
  RingPosition<kItemSlots> item;
  RingPosition<1> q;
  RingPosition<Traits::kStages> k;
  RingPosition<Traits::kStages> v;
};

// Work item `index` and what its consumers need to know.
template <class Traits>
__device__ __forceinline__ ItemState describe_item(const HopperParams& params, int index) {
  ItemState state;
  state.item = params.items[index];
  state.request = params.requests[state.item.request];
  const RequestInfo& request = state.request;
  MaskBounds bounds{request.qo_len, request.kv_len, params.window_left, params.causal};

  int tile_rows = params.box.q_heads * params.box.q_tokens;
  if (tile_rows == 1) tile_rows = Traits::kTileM;  // one box a row
  state.num_rows = min(request.qo_len * params.group_size - state.item.row_begin, tile_rows);
  RowSpan rows{unpack_row(params, state.item.row_begin).token,
               unpack_row(params, state.item.row_begin + state.num_rows - 1).token};
  KeySpan chunk{state.item.chunk * request.chunk_keys, request.kv_len};
  if (request.kv_len - chunk.begin > request.chunk_keys) {
    chunk.end = chunk.begin + request.chunk_keys;
  }
  state.tiles = touched_tiles(bounds, rows, chunk, Traits::kTileN, Mask::kBounds);
  state.keys = touched_keys(bounds, rows);
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

template <class Traits>
struct BoxLoader {
  static constexpr int kThreads = 32;

  // Where box `lane_id()` of a tile lies.
  struct Places {
    int page;
    int x;     // row in the page plus the number of its rows that are fetched
    int rows;  // which may be 0: all zero-filled
  };

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  RequestInfo request;
  KeySpan keys;
  int kv_head;

  __device__ __forceinline__ BoxLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  __device__ __forceinline__ void begin_item(const ItemState& state) {
    request = state.request;
    keys = state.keys;
    kv_head = state.item.kv_head;
  }

  // NOTE: keys below a window are fetched with the box that holds their neighbours, and zeroed by
  // the consumers; a page that holds no kept key may be somebody else's by now and is not touched.
  __device__ __forceinline__ Places find(int tile) const {
    int key = tile * Traits::kTileN + lane_id() * params.box.kv_rows;
    Places places;
    places.rows = min(max(keys.end - key, 0), params.box.kv_rows);
    if (key + places.rows <= keys.begin) places.rows = 0;
    places.page = 0;
    places.x = request.kv_begin + key;
    if (params.page_indices != nullptr) {
      int page;
      params.page(page, places.x, key);
      bool inside = places.rows > 0 && lane_id() * params.box.kv_rows < Traits::kTileN;
      if (inside) places.page = __ldg(params.page_indices + request.kv_begin + page);
    }
    places.x = places.rows > 0 ? places.x + places.rows : 0;
    return places;
  }

  __device__ __forceinline__ void fetch_k(const Places& places, int stage) const {
    fetch<Traits::kBlocksQk>(places, &params.maps.k, smem.barriers.k_full[stage],
                             smem.k + stage * (Traits::kTileN * Traits::kHeadQk));
  }
  __device__ __forceinline__ void fetch_v(const Places& places, int stage) const {
    fetch<Traits::kBlocksVo>(places, &params.maps.v, smem.barriers.v_full[stage],
                             smem.v + stage * (Traits::kTileN * Traits::kHeadVo));
  }
  __device__ __forceinline__ void drain() {}

 private:
  template <int kBlocks>
  __device__ __forceinline__ void fetch(const Places& places, const CUtensorMap* map,
                                        BytesBarrier& full, typename Traits::Element* target) const {
    constexpr int kBlockElements = Traits::kTileN * kBlockColumns;
    if (lane_id() == 0) full.arrive_and_expect_tx(kBlocks * kBlockElements * 2);
    int box_rows = params.box.kv_rows;
    for (int row = 0, box = 0; row < Traits::kTileN; row += box_rows, ++box) {
      int page = __shfl_sync(0xffffffffu, places.page, box);
      int x = __shfl_sync(0xffffffffu, places.x, box);
      int first = box_rows - __shfl_sync(0xffffffffu, places.rows, box);
      if (lane_id() != 0) continue;
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                               static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_LAST),
                               target + block * kBlockElements + row * kBlockColumns,
                               block * kBlockColumns, first, x, kv_head, page);
      }
    }
  }
};

template <class Traits>
struct RowLoader {
  static constexpr int kThreads = kWarpgroupThreads;
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
  BytesBarrier* unpublished = nullptr;  // its rows are in flight

  __device__ __forceinline__ RowLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  __device__ __forceinline__ void begin_item(const ItemState& state) {
    request = state.request;
    keys = state.keys;
    kv_head = state.item.kv_head;
  }

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

  __device__ __forceinline__ void fetch_k(const Places& places, int stage) {
    fetch<Traits::kBlocksQk>(places, params.k, params.head_dim_qk,
                             smem.k + stage * (Traits::kTileN * Traits::kHeadQk));
    publish_before(smem.barriers.k_full[stage]);
  }
  __device__ __forceinline__ void fetch_v(const Places& places, int stage) {
    fetch<Traits::kBlocksVo>(places, params.v, params.head_dim_vo,
                             smem.v + stage * (Traits::kTileN * Traits::kHeadVo));
    publish_before(smem.barriers.v_full[stage]);
  }

  __device__ __forceinline__ void drain() {
    cp_async_wait<0>();
    publish();
  }

 private:
  __device__ __forceinline__ static int warp_row() { return threadIdx.x / 32 * kWarpKeys; }

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

// One CTA's share of the work list, by the threads of TileLoader.
template <class Traits, class TileLoader>
__device__ __forceinline__ void produce(const HopperParams& params, SharedStorage<Traits>& smem,
                                        int begin, int end) {
  auto& barriers = smem.barriers;
  ProducerState<Traits> at;
  TileLoader loader(params, smem);
  auto fetch_k = [&](const typename TileLoader::Places& places) {
    barriers.k_empty[at.k.index].wait(at.k.phase ^ 1);
    loader.fetch_k(places, at.k.index);
    at.k.advance();
  };
  auto fetch_v = [&](const typename TileLoader::Places& places) {
    barriers.v_empty[at.v.index].wait(at.v.phase ^ 1);
    loader.fetch_v(places, at.v.index);
    at.v.advance();
  };

  for (int index = begin; index < end; ++index) {
    ItemState state = describe_item<Traits>(params, index);
    loader.begin_item(state);
    const TileRange tiles = state.tiles;
    typename TileLoader::Places places{};
    if (tiles.count() > 0) places = loader.find(tiles.end - 1);

    if (threadIdx.x == 0) {
      barriers.item_empty[at.item.index].wait(at.item.phase ^ 1);
      smem.items[at.item.index] = state;
      barriers.item_full[at.item.index].arrive();
      if (tiles.count() > 0) {
        barriers.q_empty.wait(at.q.phase ^ 1);
        fetch_q(params, state, smem);
      }
    }
    __syncwarp();
    at.item.advance();
    if (tiles.count() == 0) continue;
    at.q.advance();

    fetch_k(places);
    for (int tile = tiles.end - 2; tile >= tiles.begin; --tile) {
      typename TileLoader::Places next = loader.find(tile);
      fetch_k(next);
      fetch_v(places);
      places = next;
    }
    fetch_v(places);
  }
  loader.drain();
}

}  // namespace preflash::sm90
