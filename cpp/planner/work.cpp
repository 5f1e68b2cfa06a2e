#include "planner/work.h"

#include <algorithm>
#include <numeric>

namespace preflash {

ItemCost item_cost(const FamilyTraits& family, std::int32_t tile_n) {
  ItemCost cost;
  if (family.item_keys > 0) cost.item = (family.item_keys * ItemCost::kTile + tile_n / 2) / tile_n;
  return cost;
}

namespace {

// Counts the requests, from `first` on, that have the same lengths and are therefore cut alike.
std::size_t count_alike(std::span<const RequestInfo> requests, std::size_t first) {
  std::size_t end = first + 1;
  while (end < requests.size() && requests[end].qo_len == requests[first].qo_len &&
         requests[end].kv_len == requests[first].kv_len) {
    ++end;
  }
  return end - first;
}

// Query tiles of a request for each KV head. Where lengths are upper bounds the device may find
// that aligned tiles begin anywhere. validate() bounds qo_len * group by kMaxRequestLength, so that
// int32 holds the rows.
std::int32_t num_query_tiles(const SegmentPlan& segment, const RequestInfo& info) {
  const QueryGrid& grid = segment.tile.grid;
  const std::int32_t rows = info.qo_len * grid.group_size;
  if (rows == 0) return 0;
  std::int32_t before = grid.rows_before(info);
  if (grid.aligned && segment.problem.lengths_are_upper_bounds) {
    before = grid.rows_per_tile - std::gcd(grid.group_size, grid.rows_per_tile);
  }
  return before + rows > grid.rows_per_tile ? ceil_div(before + rows, grid.rows_per_tile) : 1;
}

// The tiles [begin, end) that rows of a request touch, counted from where its chunks begin.
struct TouchedTiles {
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t diagonal_end = 0;  // QueryTile
};

// Tiles for an upper bound of the keys include those of every smaller number.
TouchedTiles tiles_of_rows(const SegmentPlan& segment, const RequestInfo& info, RowSpan rows) {
  const SegmentProblem& problem = segment.problem;
  const std::int32_t tile_n = segment.tile.keys;
  MaskBounds bounds = bounds_of(problem, info);
  const TileRange range = touched_tiles(bounds, rows, {0, info.kv_len}, tile_n, problem.mask);
  if (range.count() == 0) return {};
  if (segment.origin.alignment == 0 || !problem.lengths_are_upper_bounds) {
    const std::int32_t first = segment.origin.of(info) / tile_n;
    bounds.causal = true;
    const std::int32_t diagonal_end =
        problem.mask == Mask::kCustom ? ceil_div(bounds.end_key(rows.last), tile_n) : range.end;
    return {range.begin - first, range.end - first, diagonal_end - first};
  }
  // Row i sees keys [i, i + reach] from the first row's window on, which begins anywhere in a tile.
  const std::int32_t reach = segment.origin.reach;
  const std::int32_t before_first_key = reach - (info.kv_len - info.qo_len);
  const std::int32_t last = problem.causal ? rows.last : info.qo_len - 1;
  const std::int32_t end = ceil_div(reach + last + tile_n, tile_n);
  return {std::max(rows.first, before_first_key) / tile_n, end, end};
}

}  // namespace

std::int64_t count_query_tiles(const SegmentPlan& segment) {
  std::int64_t total = 0;
  for (const RequestInfo& info : segment.requests) total += num_query_tiles(segment, info);
  return total;
}

std::vector<QueryTile> query_tiles(const SegmentPlan& segment) {
  const auto& [problem, requests, first_request, tile, origin, cost] = segment;
  const std::int32_t group = tile.grid.group_size;
  std::vector<QueryTile> tiles;
  tiles.reserve(requests.size());
  for (std::size_t r = 0; r < requests.size();) {
    const RequestInfo& info = requests[r];
    const std::size_t alike = count_alike(requests, r);
    const std::int32_t request = first_request + static_cast<std::int32_t>(r);
    const std::int32_t num_tiles = num_query_tiles(segment, info);
    for (std::int32_t t = 0; t < num_tiles; ++t) {
      const std::int32_t row_begin = t * tile.grid.rows_per_tile;
      const QueryRows rows = tile.grid.rows(info, row_begin);
      RowSpan span = rows.tokens(group);
      if (rows.count <= 0) span.first = span.last = info.qo_len - 1;  // rows of other lengths
      const TouchedTiles touched = tiles_of_rows(segment, info, span);
      tiles.push_back({.request = request,
                       .row_begin = row_begin,
                       .rows = tile.grid.partial_rows(info, rows),
                       .kv_begin = touched.begin,
                       .kv_end = touched.end,
                       .diagonal_end = touched.diagonal_end,
                       .alike = static_cast<std::int32_t>(alike)});
    }
    r += alike;
  }
  return tiles;
}

std::vector<QueryTile> expand_alike(std::span<const QueryTile> tiles) {
  std::vector<QueryTile> result;
  for (std::size_t begin = 0; begin < tiles.size();) {
    std::size_t end = begin;
    while (end < tiles.size() && tiles[end].request == tiles[begin].request) ++end;
    for (std::int32_t i = 0; i < tiles[begin].alike; ++i) {
      for (QueryTile tile : tiles.subspan(begin, end - begin)) {
        tile.request += i;
        tile.alike = 1;
        result.push_back(tile);
      }
    }
    begin = end;
  }
  return result;
}

namespace {

// Bytes of K and V of one head, if several of the request's query tiles read them.
std::int64_t reused_kv_bytes(const SegmentProblem& problem, const RequestInfo& info,
                             std::ptrdiff_t num_tiles) {
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

// Appends the units of a segment's requests, one request after the other.
class Cutter {
 public:
  Cutter(const SegmentPlan& segment, std::int32_t chunk_tiles, WorkList& work)
      : segment_(segment),
        chunk_tiles_(chunk_tiles),
        work_(work),
        sums_(work.segments.add(
            {.first_unit = num_units(), .num_kv_heads = segment.problem.num_kv_heads})),
        request_{.num_kv_heads = segment.problem.num_kv_heads} {}

  // tiles: of the request.
  void cut(const RequestInfo& info, std::span<const QueryTile> tiles) {
    const SegmentWork before = sums_;
    request_ = {.first_unit = num_units(), .num_kv_heads = sums_.num_kv_heads};
    kv_tiles_ = 0;
    for (const QueryTile& tile : tiles) append_chunks(tile);
    request_.num_units = num_units() - request_.first_unit;
    request_.reused_kv_bytes = reused_kv_bytes(segment_.problem, info, std::ssize(tiles));
    num_merges_ = sums_.num_merges - before.num_merges;
    num_partial_rows_ = sums_.num_partial_rows - before.num_partial_rows;
    add_requests(1);
  }

  // The next requests have the lengths of the last one.
  void repeat(std::int32_t times) {
    const std::size_t size = work_.units.size();
    work_.units.resize(size + std::int64_t{times} * request_.num_units);
    const WorkUnit* const end = work_.units.data() + size;
    WorkUnit* next = work_.units.data() + size;
    for (std::int32_t i = 1; i <= times; ++i) {
      for (const WorkUnit* unit = end - request_.num_units; unit < end; ++unit, ++next) {
        *next = *unit;
        next->request += i;
        if (unit->partial()) next->partial_row += static_cast<std::int32_t>(i * num_partial_rows_);
      }
    }
    sums_.num_merges += times * num_merges_;
    sums_.num_partial_rows += times * num_partial_rows_;
    add_requests(times);
  }

 private:
  std::int32_t num_units() const { return static_cast<std::int32_t>(work_.units.size()); }

  void append_chunks(const QueryTile& tile) {
    const ChunkSpan chunks = chunks_of(tile, chunk_tiles_);
    WorkUnit unit{.request = tile.request,
                  .row_begin = tile.row_begin,
                  .rows = tile.rows,
                  .num_chunks = static_cast<std::int16_t>(chunks.count())};
    std::int32_t begin = tile.kv_begin;
    for (std::int32_t c = chunks.first; c <= chunks.last; ++c) {
      const std::int32_t end = c == chunks.last ? tile.kv_end : (c + 1) * chunk_tiles_;
      unit.kv_tiles = end - begin;
      unit.chunk = static_cast<std::int16_t>(c);
      const std::int32_t behind = std::clamp(end - tile.diagonal_end, 0, unit.kv_tiles);
      unit.cost =
          segment_.cost.of(unit.kv_tiles, unit.partial()) - behind * ItemCost::kBehindDiagonal;
      if (unit.partial()) {
        const std::int64_t rows_before = std::int64_t{c - chunks.first} * tile.rows;
        unit.partial_row = static_cast<std::int32_t>(sums_.num_partial_rows + rows_before);
      }
      append(unit);
      begin = end;
    }
    if (unit.partial()) {
      sums_.num_partial_rows += std::int64_t{sums_.num_kv_heads} * chunks.count() * tile.rows;
      sums_.num_merges += sums_.num_kv_heads;
    }
  }

  void append(const WorkUnit& unit) {
    kv_tiles_ += unit.kv_tiles;
    request_.cost += unit.cost;
    request_.longest = std::max(request_.longest, unit.cost);
    work_.units.push_back(unit);
  }

  // The units of so many requests like request_ were appended.
  void add_requests(std::int32_t times) {
    const std::int64_t heads = std::int64_t{times} * request_.num_kv_heads;
    sums_.num_units += times * request_.num_units;
    work_.num_items += heads * request_.num_units;
    work_.num_kv_tiles += heads * kv_tiles_;
    work_.cost += heads * request_.cost;
    work_.longest = std::max(work_.longest, request_.longest);
    work_.most_units = std::max(work_.most_units, request_.num_units);
    const std::int64_t reused = request_.num_kv_heads * request_.reused_kv_bytes;
    for (std::int32_t i = 0; i < times; ++i) {
      work_.reused_kv_bytes = std::min(work_.reused_kv_bytes + reused, kMostReusedBytes);
      work_.requests.push_back(request_);
      request_.first_unit += request_.num_units;
    }
  }

  const SegmentPlan& segment_;
  const std::int32_t chunk_tiles_;
  WorkList& work_;
  SegmentWork& sums_;

  RequestWork request_;        // the last one, but that first_unit is the next one's
  std::int64_t kv_tiles_ = 0;  // the last request's, per head
  std::int64_t num_merges_ = 0;
  std::int64_t num_partial_rows_ = 0;
};

}  // namespace

void cut(const SegmentPlan& segment, std::span<const QueryTile> tiles, std::int32_t chunk_tiles,
         WorkList& work) {
  work.units.reserve(work.units.size() + tiles.size());
  work.requests.reserve(work.requests.size() + segment.requests.size());
  Cutter cutter(segment, chunk_tiles, work);
  std::size_t begin = 0;  // of the request's tiles
  for (std::size_t r = 0; r < segment.requests.size();) {
    const std::int32_t request = segment.first_request + static_cast<std::int32_t>(r);
    std::size_t end = begin;
    while (end < tiles.size() && tiles[end].request == request) ++end;
    cutter.cut(segment.requests[r], tiles.subspan(begin, end - begin));
    // Requests without queries have no tile to say how many they are.
    const std::int32_t alike = begin < end ? tiles[begin].alike : 1;
    if (alike > 1) cutter.repeat(alike - 1);
    begin = end;
    r += alike;
  }
}

}  // namespace preflash
