// TMA loads: Q always, K and V where the page size is a multiple of 8 rows.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/sm90/tile_ring.cuh"

namespace preflash::sm90 {

template <class Traits>
struct QLoader {
  const ParamsOf<Traits>& params;
  SharedStorage<Traits>& smem;
  ProducerPipelineState<Traits::kQStages> write = {};

  CUTE_DEVICE void load(const ItemState& state) {
    ring().empty[at().index()].wait(at().phase() ^ 1);
    if (elect_one_sync()) fetch(params.segment_of(state.request), state);
    __syncwarp();
    write.advance();
  }

 private:
  // Q that is quantised arrives in a buffer of its own.
  CUTE_DEVICE auto& ring() const {
    if constexpr (Traits::kQuantizesQ) {
      return smem.raw_q.ring;
    } else {
      return smem.barriers.q;
    }
  }
  CUTE_DEVICE auto at() const {
    return ProducerPipelineState<Traits::kQuantizesQ ? 1 : Traits::kQStages>{write.count};
  }
  CUTE_DEVICE auto* buffer() const {
    if constexpr (Traits::kQuantizesQ) {
      return smem.raw_q.rows;
    } else {
      return smem.q + write.index() * (Traits::kTileM * Traits::kRowQk);
    }
  }

  // Token-aligned rows take one box per block of columns; where a group has more heads than the
  // tile has rows, every row is a box. Rows that are to be converted arrive as they are stored.
  CUTE_DEVICE void fetch(const HopperSegment& segment, const ItemState& state) {
    auto* q = buffer();
    constexpr int kColumns = kBlockRowBytes / sizeof(*q);
    constexpr int kBlocks = std::max(Traits::kHeadQk / kColumns, 1);
    const bool narrow = Traits::kConverts && size_of(segment.q_dtype) == 1;
    const int columns = narrow ? kBlockRowBytes : kColumns;
    const int blocks = narrow ? ceil_div(Traits::kHeadQk, kBlockRowBytes) : kBlocks;
    TransactionBarrier& full = ring().full[at().index()];
    int box_rows = segment.box.q_heads * segment.box.q_tokens;
    int num_boxes = segment.group_size <= Traits::kTileM ? 1 : state.num_rows;
    full.arrive_and_expect_tx(num_boxes * box_rows * kBlockRowBytes * blocks);
    for (int i = 0; i < num_boxes; ++i) {
      PackedRow row = unpack_row(segment, state.item.row_begin + i);
      for (int block = 0; block < blocks; ++block) {
        SM90_TMA_LOAD_4D::copy(&segment.maps.q, reinterpret_cast<std::uint64_t*>(&full),
                               static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_FIRST),
                               q + (block * Traits::kTileM + i) * kColumns, block * columns,
                               row.head_in_group, state.request.qo_begin + row.token,
                               state.item.kv_head);
      }
    }
  }
};

inline constexpr int kMostBoxRows = 256;

// The coordinates of box lane_id() of an item's tile of K or V. Only rows of keys in range are
// fetched: pages below a window may have been recycled, and rows past the request's end may be
// another request's.
// r > 0: a box that is loaded row by row; x is that of its first row. r then packs two numbers, and
// the rows from r / kMostBoxRows to r % kMostBoxRows are used.
template <class Traits>
CUTE_DEVICE TmaCoordinates box_coordinates(const HopperSegment& params, const ItemKeys& item,
                                           int tile) {
  int box_rows = params.box.kv_rows;
  int box_key = tile * Traits::kItemTileN + lane_id() * box_rows;
  int end = min(item.keys.end, box_key + box_rows);
  int first = max(item.keys.begin, box_key);
  int num_rows = max(end - first, 0);
  TmaCoordinates coordinates{0, 0, num_rows - box_rows};
  if (num_rows == 0 || lane_id() * box_rows >= Traits::kItemTileN) return coordinates;
  if (params.box.tail_rows == 0 && end < box_key + box_rows) {
    coordinates.r = (first - box_key) * kMostBoxRows + end - box_key;
    first = box_key;
  }
  if (params.page_indices == nullptr) {
    coordinates.x = item.kv_begin + first;
  } else {
    int page;
    params.page(page, coordinates.x, first);
    coordinates.page = __ldg(params.page_indices + item.kv_begin + page);
  }
  return coordinates;
}

// Loads the boxes of a tile or slice: kBlocks blocks of columns, from `column` on. of_lane: the
// coordinates of box lane_id(). write: TileWriter or the like. loader: of the loading warps.
// elect_one_sync() tells the compiler that a single lane issues; `lane == 0` would not.
template <class Traits, int kBlocks>
CUTE_DEVICE void load_boxes(const KvMaps& maps, TMA::CacheHintSm90 hint, int box_rows,
                            const TmaCoordinates& of_lane, int kv_head, int column,
                            const auto& write, int loader) {
  constexpr int kTileN = Traits::kTileN;
  auto* tile = write.tile();
  constexpr int kColumns = kBlockRowBytes / sizeof(*tile);
  TransactionBarrier& full = write.full();
  auto load = [&](const CUtensorMap& map, const TmaCoordinates& at, int row) {
    CUTE_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      SM90_TMA_LOAD_5D::copy(&map, reinterpret_cast<std::uint64_t*>(&full),
                             static_cast<std::uint64_t>(hint),
                             tile + (block * kTileN + row) * kColumns, column + block * kColumns,
                             at.r, at.x, kv_head, at.page);
    }
  };
  auto issue = [&](const auto& loads) {
    if (elect_one_sync()) {
      full.arrive_and_expect_tx(kTileN * kBlocks * kBlockRowBytes);
      loads();
    }
    __syncwarp();
  };
  if (box_rows == kTileN) {
    const TmaCoordinates only{warp_uniform(of_lane.page), warp_uniform(of_lane.x),
                              warp_uniform(of_lane.r)};
    return issue([&] { load(maps.boxes, only, 0); });
  }
  auto* shared = write.smem.boxes[loader];
  if (lane_id() < Traits::kMaxBoxes) shared[lane_id()] = of_lane;
  __syncwarp();
  const bool by_row = lane_id() * box_rows < kTileN && of_lane.r > 0;
  if (__any_sync(0xffffffffu, by_row)) {
    return issue([&] {
#pragma unroll 1
      for (int row = 0; row < kTileN; row += box_rows) {
        const TmaCoordinates box = shared[row / box_rows];
        if (box.r <= 0) {
          load(maps.boxes, box, row);
          continue;
        }
#pragma unroll 1
        for (int i = 0; i < box_rows; ++i) {
          const bool used = i >= box.r / kMostBoxRows && i < box.r % kMostBoxRows;
          load(maps.row, {box.page, box.x + i, used ? 0 : -1}, row + i);
        }
      }
    });
  }
  // In groups: moving one box's coordinates to uniform registers overlaps with the next box's.
  constexpr int kGroup = Traits::kMaxBoxes % 4 == 0 ? 4 : 2;
  issue([&] {
    for (int box = 0; box * box_rows < kTileN; box += kGroup) {
      TmaCoordinates group[kGroup];
      CUTE_UNROLL
      for (int i = 0; i < kGroup; ++i) group[i] = shared[box + i];
      CUTE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        const int row = (box + i) * box_rows;
        if (row < kTileN) load(maps.boxes, group[i], row);
      }
    }
  });
}

// One warp loads the tiles of one operand as TMA boxes. Writer: TileWriter or RawTile.
template <class Traits, class Writer>
struct TmaLoader {
  const ParamsOf<Traits>& params;
  Writer write;

  CUTE_DEVICE TmaLoader(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : params(params), write{smem} {}

  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto& after_first) {
    const ItemKeys item = ItemKeys::of(state);
    const HopperSegment& segment = params.segment(item.segment);
    const KvMaps& maps = Writer::Source::kIsK ? segment.maps.k : segment.maps.v;
    // The keys of a decode batch are read once. Without the hint they would evict data from the L2
    // that is read again: the prefill's keys, the page table, the next kernel's inputs.
    const bool once = state.request.qo_len * segment.group_size <= segment.rows_per_tile;
    const auto hint = once ? TMA::CacheHintSm90::EVICT_FIRST : TMA::CacheHintSm90::EVICT_LAST;
    auto look_up = [&](int tile) { return box_coordinates<Traits>(segment, item, tile); };
    for_each_tile(tiles, state, look_up, [&](const TmaCoordinates& boxes, bool is_first) {
      write.wait();
      load_boxes<Traits, Writer::kBlocks>(maps, hint, segment.box.kv_rows, boxes, item.kv_head, 0,
                                          write, !Writer::Source::kIsK);
      write.next.advance();
      if (is_first) after_first();
    });
  }
  CUTE_DEVICE static void drain() {}
};

}  // namespace preflash::sm90
