// The producer warpgroup: work items, Q, and the K/V tiles of each, last tile first.
//
//   produce_boxes: ragged tensors and pages of 8 n rows, by TMA. One warp works the items out, one
//     fetches Q and K, one V; in the last two one lane issues boxes while the other lanes look up
//     the page of one box each, a tile ahead.
//   produce_rows: any other page size, page 1 above all, by cp.async. All four warps copy rows of K
//     and V in turn; each lane looks up the page of one or two rows, two tiles ahead.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/sm90/forward_epilogue.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

// Tiles that the rows [first, end) of an item's tile touch.
template <class Traits>
__device__ __forceinline__ TileRange tiles_of_rows(const HopperParams& params, const WorkItem& item,
                                                   const RequestInfo& request, int first, int end) {
  MaskBounds bounds{request.qo_len, request.kv_len, params.window_left, params.causal};
  RowSpan rows{unpack_row(params, item.row_begin + first).token,
               unpack_row(params, item.row_begin + end - 1).token};
  KeySpan chunk{item.chunk * request.chunk_keys, request.kv_len};
  if (request.kv_len - chunk.begin > request.chunk_keys) {
    chunk.end = chunk.begin + request.chunk_keys;
  }
  return touched_tiles(bounds, rows, chunk, Traits::kTileN, Mask::kBounds);
}

// What the rows of one consumer warpgroup touch of tiles [.., last]. Where that is nothing the last
// tile, wholly masked, makes zeros like everybody else's.
template <class Traits>
__device__ __forceinline__ TileRange tiles_of_warpgroup(const HopperParams& params,
                                                        const ItemState& state, int warpgroup) {
  if constexpr (!Traits::kSkipsTiles) return state.tiles;
  int first = warpgroup * kWarpgroupRows;
  int end = min(first + kWarpgroupRows, state.num_rows);
  if (first < end) {
    TileRange tiles = tiles_of_rows<Traits>(params, state.item, state.request, first, end);
    if (tiles.count() > 0) return tiles;
  }
  int last = state.tiles.end - 1;
  return {last, last, last, last + 1};
}

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
                             q + block * kBlockElements + i * kBlockColumns,
                             block * kBlockColumns, row.head_in_group,
                             state.request.qo_begin + row.token, state.item.kv_head);
    }
  }
}

// Works items out and announces them, by one warp. What keeps no key is written here and now: nobody
// else meets an item without tiles.
template <class Traits>
struct ItemProducer {
  const HopperParams& params;
  SharedStorage<Traits>& smem;
  int index;
  int end;
  ProducerRing<kItemSlots> at = {};

  // The next item, or the word that there is none.
  __device__ __forceinline__ void announce() {
    WorkItem item;
    RequestInfo request;
    TileRange tiles = {};
    int num_rows = 0;
    for (; index < end; ++index) {
      item = params.items[index];
      request = params.requests[item.request];
      num_rows = min(request.qo_len * params.group_size - item.row_begin, params.rows_per_tile);
      tiles = tiles_of_rows<Traits>(params, item, request, 0, num_rows);
      if (tiles.count() > 0) break;
      ForwardEpilogue<Traits>{params, item, request, num_rows}.run_empty();
    }
    ++index;
    smem.barriers.item_empty[at.index()].wait(at.phase() ^ 1);
    ItemState& state = smem.items[at.index()];
    if (elect_one_sync()) {
      MaskBounds bounds{request.qo_len, request.kv_len, params.window_left, params.causal};
      int first_token = unpack_row(params, item.row_begin).token;
      state.item = item;
      state.request = request;
      state.tiles = tiles;
      state.keys = {bounds.first_key(first_token), request.kv_len};
      state.num_rows = num_rows;
    }
    __syncwarp();
    if (lane_id() < Traits::kConsumers) {
      state.warpgroup_tiles[lane_id()] = tiles_of_warpgroup<Traits>(params, state, lane_id());
    }
    __syncwarp();
    if (elect_one_sync()) smem.barriers.item_full[at.index()].arrive();
    __syncwarp();
    at.advance();
  }
  __device__ __forceinline__ bool done() const { return index > end; }
};

// The items of one CTA as a loading warp meets them.
template <class Traits>
struct ItemReader {
  SharedStorage<Traits>& smem;
  ProducerRing<kItemSlots> at = {};

  // Null: there is no more.
  __device__ __forceinline__ const ItemState* wait() const {
    smem.barriers.item_full[at.index()].wait(at.phase());
    const ItemState& state = smem.items[at.index()];
    return warp_uniform(state.tiles.count()) > 0 ? &state : nullptr;
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (elect_one_sync()) smem.barriers.item_empty[at.index()].arrive();
    at.advance();
  }
};

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
  int kv_begin;
  KeySpan keys;
  int kv_head;
  ProducerRing<Traits::kStages> at;

  __device__ __forceinline__ BoxLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  // Calls after_first() when the first tile is on its way.
  template <class AfterFirst>
  __device__ __forceinline__ void load_item(const ItemState& state, AfterFirst&& after_first) {
    kv_begin = state.request.kv_begin;
    keys = state.keys;
    kv_head = state.item.kv_head;
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

  // Of box lane_id(). The rows that are fetched are those of kept keys: what lies below a window may have been
  // recycled, page and all, and what lies past the request's end is not its own.
  __device__ __forceinline__ BoxPlace find(int tile) const {
    int box_rows = params.box.kv_rows;
    int box_key = tile * Traits::kTileN + lane_id() * box_rows;
    int first = max(keys.begin, box_key);
    int num_rows = max(min(keys.end, box_key + box_rows) - first, 0);
    BoxPlace place{0, 0, num_rows - box_rows};
    if (num_rows == 0 || lane_id() * box_rows >= Traits::kTileN) return place;
    if (params.page_indices == nullptr) {
      place.x = kv_begin + first;
    } else {
      int page;
      params.page(page, place.x, first);
      place.page = __ldg(params.page_indices + kv_begin + page);
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
                             block * kBlockColumns, place.r, place.x, kv_head, place.page);
    }
  }
};

// Both operands' tiles row by row, by all threads of the warpgroup: each warp a quarter of the rows,
// eight lanes the 128 bytes of one row's 64-column block.
template <class Traits>
struct RowLoader {
  using Element = typename Traits::Element;
  static constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;
  static constexpr int kOwned = ceil_div(kWarpKeys, 32);  // rows that a lane looks up
  static constexpr int kRowsPerPass = 4;
  static constexpr int kPasses = kWarpKeys / kRowsPerPass;
  static_assert(kWarpKeys % kRowsPerPass == 0);
  // Offsets travel between lanes in units of 16 bytes: 32 bits of them reach 64 GiB.
  static constexpr int kUnitElements = 8;

  enum class Fill { kWhole, kPartial };  // whether every row and column of a tile is there

  // Rows i * 32 + lane_id() of the warp's share. Looked up early and put to use late: the page index
  // takes a trip to L2.
  struct Places {
    KeySlot slot[kOwned];
  };

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  int kv_begin;
  KeySpan keys;
  int kv_head;
  ProducerRing<Traits::kStages> k;
  ProducerRing<Traits::kStages> v;
  BytesBarrier* unpublished = nullptr;  // its rows are in flight

  __device__ __forceinline__ RowLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  // K(last), then K(t - 1), V(t) for each tile: the order in which S(t - 1) = Q K^T runs ahead of
  // O += P V(t). Pages are looked up a tile ahead. Calls after_first() when K(last) is on its way.
  template <class AfterFirst>
  __device__ __forceinline__ void load_item(const ItemState& state, AfterFirst&& after_first) {
    kv_begin = state.request.kv_begin;
    keys = state.keys;
    kv_head = state.item.kv_head;
    const int begin = warp_uniform(state.tiles.begin);
    const int first = warp_uniform(state.tiles.end) - 1;
    Places places = find(first);
    Places next = find(first - 1);
    fetch_k(places, first);
    after_first();
    for (int tile = first; tile > begin; --tile) {
      Places ahead = find(tile - 2);
      fetch_k(next, tile - 1);
      fetch_v(places, tile);
      places = next;
      next = ahead;
    }
    fetch_v(places, begin);
  }

  __device__ __forceinline__ void drain() {
    cp_async_wait<0>();
    publish();
  }

 private:
  __device__ __forceinline__ static int warp_row() { return threadIdx.x / 32 * kWarpKeys; }

  // Of rows that are there; others get the place of one that is.
  __device__ __forceinline__ Places find(int tile) const {
    Places places;
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      int key = tile * Traits::kTileN + warp_row() + i * 32 + lane_id();
      places.slot[i] =
          find_slot(params, kv_begin, max(min(key, keys.end - 1), keys.begin));
    }
    return places;
  }

  __device__ __forceinline__ void fetch_k(const Places& places, int tile) {
    smem.barriers.k_empty[k.index()].wait(k.phase() ^ 1);
    fetch<Traits::kBlocksQk>(places, tile, params.k, params.head_dim_qk,
                             smem.k + k.index() * (Traits::kTileN * Traits::kHeadQk));
    publish_before(smem.barriers.k_full[k.index()]);
    k.advance();
  }
  __device__ __forceinline__ void fetch_v(const Places& places, int tile) {
    smem.barriers.v_empty[v.index()].wait(v.phase() ^ 1);
    fetch<Traits::kBlocksVo>(places, tile, params.v, params.head_dim_vo,
                             smem.v + v.index() * (Traits::kTileN * Traits::kHeadVo));
    publish_before(smem.barriers.v_full[v.index()]);
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
  __device__ __forceinline__ void fetch(const Places& places, int tile, const KvTensor& tensor,
                                        int head_dim, Element* target) const {
    std::uint32_t offsets[kOwned];
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      offsets[i] =
          static_cast<std::uint32_t>(slot_offset(tensor, places.slot[i]) / kUnitElements);
    }
    int key = tile * Traits::kTileN;
    bool whole = key >= keys.begin && key + Traits::kTileN <= keys.end &&
                 head_dim == kBlocks * kBlockColumns;
    if (whole) {
      copy_rows<kBlocks, Fill::kWhole>(offsets, key, tensor, head_dim, target);
    } else {
      copy_rows<kBlocks, Fill::kPartial>(offsets, key, tensor, head_dim, target);
    }
  }

  template <int kBlocks, Fill kFill>
  __device__ __forceinline__ void copy_rows(const std::uint32_t (&offsets)[kOwned], int tile_key,
                                            const KvTensor& tensor, int head_dim,
                                            Element* tile) const {
    constexpr int kPassesPerOwned = 32 / kRowsPerPass;
    int column = lane_id() % 8 * kUnitElements;
    int lane_row = lane_id() / 8;
    auto* head = static_cast<const Element*>(tensor.data) + kv_head * tensor.stride_head + column;
    // The swizzle moves a 16-byte piece by its row modulo 8: two kinds of pass, 4 rows apart.
    int row = warp_row() + lane_row;
    std::uint32_t rows = cast_smem_ptr_to_uint(tile) + row * kBlockRowBytes;
    std::uint32_t targets[2] = {rows + (lane_id() % 8 ^ row % 8) * 16,
                                rows + (lane_id() % 8 ^ (row + kRowsPerPass) % 8) * 16};
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      std::uint32_t offset =
          __shfl_sync(0xffffffffu, offsets[pass / kPassesPerOwned],
                      pass % kPassesPerOwned * kRowsPerPass + lane_row);
      const Element* source = head + static_cast<std::int64_t>(offset) * kUnitElements;
      std::uint32_t target = targets[pass % 2] + pass * kRowsPerPass * kBlockRowBytes;
      int key = tile_key + row + pass * kRowsPerPass;
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        std::uint32_t block_target = target + block * Traits::kTileN * kBlockRowBytes;
        const Element* block_source = source + block * kBlockColumns;
        if constexpr (kFill == Fill::kWhole) {
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(block_target),
                       "l"(block_source));
        } else {
          // NOTE: with 0 source bytes nothing is read; the address need not be mapped.
          bool kept = key >= keys.begin && key < keys.end;
          int bytes = kept && block * kBlockColumns + column < head_dim ? 16 : 0;
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(block_target),
                       "l"(block_source), "r"(bytes));
        }
      }
    }
  }
};

// One CTA's share of the work list, by three warps.
template <class Traits>
__device__ __forceinline__ void produce_boxes(const HopperParams& params,
                                              SharedStorage<Traits>& smem, int begin, int end) {
  int warp = cutlass::canonical_warp_idx_sync();
  if (warp == 0) {
    ItemReader<Traits> items{smem};
    QLoader<Traits> q{params, smem};
    BoxLoader<Traits, Operand::kK> k(params, smem);
    while (const ItemState* state = items.wait()) {
      k.load_item(*state, [&] { q.load(*state); });
      items.release();
    }
  } else if (warp == 1) {
    ItemReader<Traits> items{smem};
    BoxLoader<Traits, Operand::kV> v(params, smem);
    while (const ItemState* state = items.wait()) {
      v.load_item(*state, [] {});
      items.release();
    }
  } else if (warp == 2) {
    ItemProducer<Traits> items{params, smem, begin, end};
    while (!items.done()) items.announce();
  }
}

// The same by the whole warpgroup: everybody loads rows, warp 0 does the rest too.
template <class Traits>
__device__ __forceinline__ void produce_rows(const HopperParams& params,
                                             SharedStorage<Traits>& smem, int begin, int end) {
  bool leads = cutlass::canonical_warp_idx_sync() == 0;
  ItemProducer<Traits> producer{params, smem, begin, end};
  ItemReader<Traits> items{smem};
  QLoader<Traits> q{params, smem};
  RowLoader<Traits> rows(params, smem);
  // Each round announces an item and loads the one before it.
  for (bool first = true;; first = false) {
    if (leads && !producer.done()) producer.announce();
    if (first) continue;
    const ItemState* state = items.wait();
    if (state == nullptr) break;
    rows.load_item(*state, [&] {
      if (leads) q.load(*state);
    });
    items.release();
  }
  rows.drain();
}

}  // namespace preflash::sm90
