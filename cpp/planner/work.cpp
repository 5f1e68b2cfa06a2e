#include "planner/work.h"

#include <algorithm>

namespace preflash {

ItemCost item_cost(const FamilyTraits& family, std::int32_t tile_n) {
  ItemCost cost;
  if (family.item_keys > 0) cost.item = (family.item_keys * ItemCost::kTile + tile_n / 2) / tile_n;
  return cost;
}

namespace {

// The first tile behind the diagonal of these rows, where that tells something.
std::int32_t diagonal_end(const SegmentProblem& problem, MaskBounds bounds, RowSpan rows,
                          std::int32_t tile_n) {
  bounds.causal |= problem.mask == Mask::kCustom;
  return ceil_div(bounds.end_key(rows.last), tile_n);
}

}  // namespace

// NOTE: validate() bounds qo_len * group by kMaxRequestLength, so that int32 holds it.
std::int64_t count_query_tiles(const SegmentPlan& segment) {
  const std::int32_t group = segment.problem.gqa_ratio();
  std::int64_t total = 0;
  for (const RequestInfo& info : segment.requests) {
    total += ceil_div(info.qo_len * group, segment.tile.rows);
  }
  return total;
}

std::vector<QueryTile> query_tiles(const SegmentPlan& segment) {
  const auto& [problem, requests, first_request, tile, cost] = segment;
  const std::int32_t group = problem.gqa_ratio();
  std::vector<QueryTile> tiles(count_query_tiles(segment));
  QueryTile* next = tiles.data();
  std::int32_t request = first_request;
  for (const RequestInfo& info : requests) {
    const MaskBounds bounds = bounds_of(problem, info);
    const std::int32_t rows = info.qo_len * group;
    for (std::int32_t row = 0; row < rows; row += tile.rows) {
      const std::int32_t count = std::min(tile.rows, rows - row);
      const RowSpan span{row / group, (row + count - 1) / group};
      const TileRange range =
          touched_tiles(bounds, span, {0, info.kv_len}, tile.keys, problem.mask);
      *next++ = {request,     row,       count,
                 range.begin, range.end, diagonal_end(problem, bounds, span, tile.keys)};
    }
    ++request;
  }
  return tiles;
}

namespace {

// Bytes of K and V of one head, if several of the request's query tiles read them.
std::int64_t reused_kv_bytes(const SegmentProblem& problem, const RequestInfo& info,
                             std::int32_t num_tiles) {
  if (num_tiles < 2) return 0;
  std::int64_t keys = info.kv_len;
  if (problem.window_left >= 0) {
    keys = std::min<std::int64_t>(keys, std::int64_t{problem.window_left} + info.qo_len);
  }
  if (problem.chunk_size > 0) {
    keys = std::min<std::int64_t>(keys, std::int64_t{problem.chunk_size} + info.qo_len);
  }
  return keys * (problem.head_dim_qk + problem.head_dim_vo) * size_of(problem.kv_dtype);
}

// The tile's request says for how many KV heads.
void append_chunks(const QueryTile& tile, std::int32_t chunk_tiles, const ItemCost& cost,
                   WorkList& work, SegmentWork& segment) {
  const std::int64_t num_heads = work.requests[tile.request].num_kv_heads;
  const ChunkSpan chunks = chunks_of(tile, chunk_tiles);
  WorkUnit unit{.request = tile.request,
                .row_begin = tile.row_begin,
                .rows = tile.rows,
                .num_chunks = static_cast<std::int16_t>(chunks.count())};
  std::int32_t begin = tile.kv_begin;
  for (std::int32_t c = chunks.first; c <= chunks.last; ++c) {
    const std::int32_t end = c == chunks.last ? tile.kv_end : (c + 1) * chunk_tiles;
    unit.kv_tiles = end - begin;
    unit.chunk = static_cast<std::int16_t>(c);
    const std::int32_t behind = std::clamp(end - tile.diagonal_end, 0, unit.kv_tiles);
    unit.cost = cost.of(unit.kv_tiles, unit.partial()) - behind * ItemCost::kBehindDiagonal;
    if (unit.partial()) {
      const std::int64_t rows_before = std::int64_t{c - chunks.first} * tile.rows;
      unit.partial_row = static_cast<std::int32_t>(segment.num_partial_rows + rows_before);
    }
    work.units.push_back(unit);
    begin = end;
  }
  if (unit.partial()) {
    segment.num_partial_rows += num_heads * chunks.count() * tile.rows;
    segment.num_merges += num_heads;
  }
}

// Adds up the units that were appended since request.first_unit.
void sum_up(WorkList& work, RequestWork& request) {
  request.num_units = static_cast<std::int32_t>(work.units.size()) - request.first_unit;
  std::int64_t kv_tiles = 0;
  for (const WorkUnit& unit : std::span(work.units).subspan(request.first_unit)) {
    kv_tiles += unit.kv_tiles;
    request.cost += unit.cost;
    request.longest = std::max(request.longest, unit.cost);
  }
  work.num_items += std::int64_t{request.num_units} * request.num_kv_heads;
  work.num_kv_tiles += kv_tiles * request.num_kv_heads;
  work.cost += request.cost * request.num_kv_heads;
  work.longest = std::max(work.longest, request.longest);
}

}  // namespace

void cut(const SegmentPlan& segment, std::span<const QueryTile> tiles, std::int32_t chunk_tiles,
         WorkList& work) {
  SegmentWork& sums =
      work.segments.add({.first_unit = static_cast<std::int32_t>(work.units.size())});
  work.units.reserve(work.units.size() + tiles.size());
  work.requests.resize(segment.first_request + segment.requests.size());
  std::size_t next = 0;
  std::int32_t r = segment.first_request;
  for (const RequestInfo& info : segment.requests) {
    RequestWork& request = work.requests[r];
    request.num_kv_heads = segment.problem.num_kv_heads;
    request.first_unit = static_cast<std::int32_t>(work.units.size());
    const std::size_t first_tile = next;
    for (; next < tiles.size() && tiles[next].request == r; ++next) {
      append_chunks(tiles[next], chunk_tiles, segment.cost, work, sums);
    }
    const auto num_tiles = static_cast<std::int32_t>(next - first_tile);
    request.reused_kv_bytes = reused_kv_bytes(segment.problem, info, num_tiles);
    sum_up(work, request);
    ++r;
  }
  sums.num_units = static_cast<std::int32_t>(work.units.size()) - sums.first_unit;
}

}  // namespace preflash
