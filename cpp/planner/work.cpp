#include "planner/work.h"

#include <algorithm>

namespace preflash {

ItemCost item_cost(Family family, std::int32_t tile_n) {
  ItemCost cost;
  // Fitted to the clocks of every CTA of an H100 at head_dim 64, 128 and 256
  // (docs/dev/experiments.md): an item takes as long as this many keys do.
  constexpr std::int32_t kItemKeys = 170;
  if (family == Family::kSm90) cost.item = (kItemKeys * ItemCost::kTile + tile_n / 2) / tile_n;
  return cost;
}

// NOTE: validate() bounds qo_len * group by kMaxRequestLength, so that int32 holds it.
std::int64_t count_query_tiles(const Problem& problem, std::span<const RequestInfo> requests,
                               TileExtent tile) {
  const std::int32_t group = problem.num_qo_heads / problem.num_kv_heads;
  std::int64_t total = 0;
  for (const RequestInfo& info : requests) total += ceil_div(info.qo_len * group, tile.rows);
  return total;
}

std::vector<QueryTile> query_tiles(const Problem& problem, std::span<const RequestInfo> requests,
                                   TileExtent tile) {
  const std::int32_t group = problem.num_qo_heads / problem.num_kv_heads;
  std::vector<QueryTile> tiles(count_query_tiles(problem, requests, tile));
  QueryTile* next = tiles.data();
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const RequestInfo& info = requests[r];
    const MaskBounds bounds{.qo_len = info.qo_len,
                            .kv_len = info.kv_len,
                            .window_left = problem.window_left,
                            .causal = problem.causal};
    const std::int32_t rows = info.qo_len * group;
    for (std::int32_t row = 0; row < rows; row += tile.rows) {
      const std::int32_t count = std::min(tile.rows, rows - row);
      const RowSpan span{row / group, (row + count - 1) / group};
      const TileRange range =
          touched_tiles(bounds, span, {0, info.kv_len}, tile.keys, problem.mask);
      *next++ = {static_cast<std::int32_t>(r), row, count, range.begin, range.end};
    }
  }
  return tiles;
}

namespace {

// Bytes of K and V of one head, if several of the request's query tiles read them.
std::int64_t reused_kv_bytes(const Problem& problem, const RequestInfo& info,
                             std::int32_t num_tiles) {
  if (num_tiles < 2) return 0;
  std::int64_t keys = info.kv_len;
  if (problem.window_left >= 0) {
    keys = std::min<std::int64_t>(keys, std::int64_t{problem.window_left} + info.qo_len);
  }
  return keys * (problem.head_dim_qk + problem.head_dim_vo) * size_of(problem.kv_dtype);
}

void append_chunks(const QueryTile& tile, std::int32_t chunk_tiles, std::int64_t num_heads,
                   const ItemCost& cost, WorkList& work) {
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
    unit.cost = cost.of(unit.kv_tiles, unit.partial());
    if (unit.partial()) {
      const std::int64_t rows_before = std::int64_t{c - chunks.first} * tile.rows;
      unit.partial_row = static_cast<std::int32_t>(work.num_partial_rows + rows_before);
    }
    work.units.push_back(unit);
    begin = end;
  }
  if (unit.partial()) {
    work.num_partial_rows += num_heads * chunks.count() * tile.rows;
    work.num_merges += num_heads;
  }
}

// Adds up the units that were appended since work.requests[request].first_unit.
void sum_up(WorkList& work, RequestWork& request, std::int64_t num_heads) {
  request.num_units = static_cast<std::int32_t>(work.units.size()) - request.first_unit;
  std::int64_t kv_tiles = 0;
  for (const WorkUnit& unit : std::span(work.units).subspan(request.first_unit)) {
    kv_tiles += unit.kv_tiles;
    request.cost += unit.cost;
    request.longest = std::max(request.longest, unit.cost);
  }
  work.num_kv_tiles += kv_tiles * num_heads;
  work.cost += request.cost * num_heads;
  work.longest = std::max(work.longest, request.longest);
}

}  // namespace

WorkList cut(std::span<const QueryTile> tiles, const Problem& problem,
             std::span<const RequestInfo> requests, std::int32_t chunk_tiles,
             const ItemCost& cost) {
  WorkList work;
  work.units.reserve(tiles.size());
  work.requests.resize(requests.size());
  std::size_t next = 0;
  for (std::size_t r = 0; r < requests.size(); ++r) {
    RequestWork& request = work.requests[r];
    request.first_unit = static_cast<std::int32_t>(work.units.size());
    const std::size_t first_tile = next;
    for (; next < tiles.size() && tiles[next].request == static_cast<std::int32_t>(r); ++next) {
      append_chunks(tiles[next], chunk_tiles, problem.num_kv_heads, cost, work);
    }
    const auto num_tiles = static_cast<std::int32_t>(next - first_tile);
    request.reused_kv_bytes = reused_kv_bytes(problem, requests[r], num_tiles);
    sum_up(work, request, problem.num_kv_heads);
  }
  work.num_items = static_cast<std::int64_t>(work.units.size()) * problem.num_kv_heads;
  return work;
}

}  // namespace preflash
