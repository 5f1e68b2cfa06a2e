// TMA loads: Q always, K and V where the page size is a multiple of 8 rows.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/tile_stream.cuh"

namespace preflash::sm90 {

// One warp loads Q.
template <class Traits>
struct QLoader {
  const ParamsOf<Traits>& params;
  SharedStorage<Traits>& smem;
  ProducerPipelineState<Traits::kQStages> write = {};

  CUTE_DEVICE void load(const ItemState& state) {
    smem.barriers.q_empty[write.index()].wait(write.phase() ^ 1);
    if (elect_one_sync()) fetch(params.segment_of(state.request), state);
    __syncwarp();
    write.advance();
  }

 private:
  // Token-aligned rows take one box per block of columns; where a group has more heads than the
  // tile has rows, every row is a box. Rows that are to be converted arrive as they are stored.
  CUTE_DEVICE void fetch(const HopperSegment& segment, const ItemState& state) {
    using Element = typename Traits::ElementQ;
    const bool narrow = Traits::kConverts && size_of(segment.q_dtype) == 1;
    const int columns = narrow ? kBlockRowBytes : kBlockColumns<Element>;
    const int blocks = narrow ? ceil_div(Traits::kHeadQk, kBlockRowBytes) : Traits::kBlocksQ;
    TransactionBarrier& full = smem.barriers.q_full[write.index()];
    auto* q = smem.q + write.index() * (Traits::kTileM * Traits::kRowQk);
    int box_rows = segment.box.q_heads * segment.box.q_tokens;
    int num_boxes = segment.group_size <= Traits::kTileM ? 1 : state.num_rows;
    full.arrive_and_expect_tx(num_boxes * box_rows * kBlockRowBytes * blocks);
    for (int i = 0; i < num_boxes; ++i) {
      PackedRow row = unpack_row(segment, state.item.row_begin + i);
      for (int block = 0; block < blocks; ++block) {
        SM90_TMA_LOAD_4D::copy(&segment.maps.q, reinterpret_cast<std::uint64_t*>(&full),
                               static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_FIRST),
                               q + (block * Traits::kTileM + i) * kBlockColumns<Element>,
                               block * columns, row.head_in_group,
                               state.request.qo_begin + row.token, state.item.kv_head);
      }
    }
  }
};

// The coordinates of box lane_id() of a K/V tile. Only rows of keys in range are fetched: pages
// below a window may have been recycled, and rows past the request's end may be another request's.
template <class Traits>
CUTE_DEVICE TmaCoordinates box_coordinates(const HopperSegment& params, const ItemKeys& item,
                                           int tile) {
  int box_rows = params.box.kv_rows;
  int box_key = tile * Traits::kTileN + lane_id() * box_rows;
  int first = max(item.keys.begin, box_key);
  int num_rows = max(min(item.keys.end, box_key + box_rows) - first, 0);
  TmaCoordinates coordinates{0, 0, num_rows - box_rows};
  if (num_rows == 0 || lane_id() * box_rows >= Traits::kTileN) return coordinates;
  if (params.page_indices == nullptr) {
    coordinates.x = item.kv_begin + first;
  } else {
    int page;
    params.page(page, coordinates.x, first);
    coordinates.page = __ldg(params.page_indices + item.kv_begin + page);
  }
  return coordinates;
}

// One warp loads the tiles of one operand as TMA boxes.
template <class Traits, Operand kOperand, class Writer = TileWriter<Traits, kOperand>>
struct TmaLoader {
  using Element = typename Writer::Element;
  static constexpr int kColumns = kBlockColumns<Element>;
  static constexpr int kTileBytes = Traits::kTileN * Writer::kHead * sizeof(Element);
  static_assert(Traits::kMaxBoxes <= 32, "each lane finds the coordinates of one box");

  const ParamsOf<Traits>& params;
  Writer write;
  ItemKeys item;
  TMA::CacheHintSm90 hint = TMA::CacheHintSm90::EVICT_LAST;  // other query tiles read them, too

  CUTE_DEVICE TmaLoader(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : params(params), write{smem} {}

  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto& after_first) {
    item = ItemKeys::of(state);
    hint = cache_hint(state);
    auto look_up = [&](int tile) { return box_coordinates<Traits>(segment(), item, tile); };
    for_each_tile(tiles, state, look_up, [&](const TmaCoordinates& boxes, bool is_first) {
      write.wait();
      fetch(boxes);
      write.next.advance();
      if (is_first) after_first();
    });
  }

 private:
  CUTE_DEVICE const HopperSegment& segment() const { return params.segment(item.segment); }
  // The keys of a decode batch are read once. Without the hint they would evict data from the L2
  // that is read again: the prefill's keys, the page table, the next kernel's inputs.
  CUTE_DEVICE TMA::CacheHintSm90 cache_hint(const ItemState& state) const {
    bool once = state.request.qo_len * segment().group_size <= segment().rows_per_tile;
    return once ? TMA::CacheHintSm90::EVICT_FIRST : TMA::CacheHintSm90::EVICT_LAST;
  }

  // elect_one_sync() tells the compiler that a single lane issues; `lane == 0` would not.
  CUTE_DEVICE void fetch(const TmaCoordinates& coordinates) const {
    TransactionBarrier& full = write.full();
    Element* tile = write.tile();
    const int box_rows = segment().box.kv_rows;
    if (box_rows == Traits::kTileN) {
      TmaCoordinates only{warp_uniform(coordinates.page), warp_uniform(coordinates.x),
                          warp_uniform(coordinates.r)};
      if (elect_one_sync()) {
        full.arrive_and_expect_tx(kTileBytes);
        issue(only, tile, full);
      }
      __syncwarp();
      return;
    }
    auto* shared = Writer::kIsK ? write.smem.k_coordinates : write.smem.v_coordinates;
    if (lane_id() < Traits::kMaxBoxes) shared[lane_id()] = coordinates;
    __syncwarp();
    if (elect_one_sync()) {
      full.arrive_and_expect_tx(kTileBytes);
      // In groups: moving one box's coordinates to uniform registers overlaps with the next box's.
      constexpr int kGroup = 4;
      static_assert(Traits::kMaxBoxes % kGroup == 0);
      for (int box = 0; box * box_rows < Traits::kTileN; box += kGroup) {
        TmaCoordinates group[kGroup];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) group[i] = shared[box + i];
        CUTE_UNROLL
        for (int i = 0; i < kGroup; ++i) {
          int row = (box + i) * box_rows;
          if (row < Traits::kTileN) issue(group[i], tile + row * kColumns, full);
        }
      }
    }
    __syncwarp();
  }

  CUTE_DEVICE void issue(const TmaCoordinates& coordinates, Element* target,
                         TransactionBarrier& full) const {
    const TensorMaps& maps = segment().maps;
    const CUtensorMap* map = Writer::kIsK ? &maps.k : &maps.v;
    CUTE_UNROLL
    for (int block = 0; block < Writer::kBlocks; ++block) {
      SM90_TMA_LOAD_5D::copy(map, reinterpret_cast<std::uint64_t*>(&full),
                             static_cast<std::uint64_t>(hint),
                             target + block * (Traits::kTileN * kColumns), block * kColumns,
                             coordinates.r, coordinates.x, item.kv_head, coordinates.page);
    }
  }
};

}  // namespace preflash::sm90
