// The planner's own vocabulary: what is known of the work before it is ordered. A request's work is
// the same for each KV head, so heads appear only when items are written out. Requests of all
// segments are numbered as one list, segment by segment.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "preflash/plan.h"
#include "preflash/problem.h"
#include "preflash/variant.h"

namespace preflash {

// Cost model of split decisions, in KV tiles. A KV tile takes about the same time (3 us at two CTAs
// per SM of an H100) in a compute-bound tall tile and in a memory-bound short one. The constants
// are rough on purpose: they only have to keep the planner from cutting work into crumbs.
struct CostModel {
  static constexpr std::int32_t kItem = 2;     // load Q, fill the pipeline, store O
  static constexpr std::int32_t kPartial = 1;  // more, when O is stored as float32 partials
  static constexpr std::int32_t kMerge = 4;    // the combine launch
};

// The costs by which items are assigned to CTAs, in quarters of a KV tile. No item moves at run
// time, so errors of this model remain.
struct ItemCost {
  static constexpr std::int32_t kTile = 4;
  // Only the device knows which tiles a custom mask keeps, but most masks are causal ones with
  // something on top. A tile past the diagonal counts this much less: little enough to give all
  // CTAs as many tiles if all are kept, and enough to give all of them early and late rows.
  static constexpr std::int32_t kBehindDiagonal = kTile / 2;
  std::int32_t item = CostModel::kItem * kTile;
  std::int32_t partial = CostModel::kPartial * kTile;  // more, as in CostModel

  std::int32_t of(std::int32_t kv_tiles, bool is_partial) const {
    return kv_tiles * kTile + item + (is_partial ? partial : 0);
  }
};
ItemCost item_cost(const FamilyTraits& family, std::int32_t tile_n);

// A tile of packed query rows and the KV tiles [kv_begin, kv_end) that its rows touch. It stands
// for those of `alike` requests of the same lengths, of which its own is the first: whole decode
// batches often are alike.
struct QueryTile {
  std::int32_t request = 0;
  std::int32_t row_begin = 0;  // WorkItem::row_begin
  std::int32_t rows = 0;       // QueryGrid::partial_rows()
  std::int32_t kv_begin = 0;
  std::int32_t kv_end = 0;
  std::int32_t diagonal_end = 0;  // custom masks: tiles from here on are past the diagonal
  std::int32_t alike = 1;

  std::int32_t kv_tiles() const { return kv_end - kv_begin; }
};

// The KV chunks [first, last] that a query tile touches, in chunks of `chunk_tiles` KV tiles. A
// tile that touches nothing still needs its rows written: it has chunk 0.
struct ChunkSpan {
  std::int32_t first = 0;
  std::int32_t last = 0;

  std::int32_t count() const { return last - first + 1; }
};

inline ChunkSpan chunks_of(const QueryTile& tile, std::int32_t chunk_tiles) {
  if (tile.kv_tiles() == 0 || tile.kv_end <= chunk_tiles) return {};
  return {tile.kv_begin / chunk_tiles, (tile.kv_end - 1) / chunk_tiles};
}

// One item for every KV head.
struct WorkUnit {
  std::int32_t request = 0;
  std::int32_t row_begin = 0;
  std::int32_t rows = 0;
  std::int32_t kv_tiles = 0;
  std::int32_t partial_row = WorkItem::kFinal;  // of head 0
  std::int16_t chunk = 0;
  std::int16_t num_chunks = 1;  // of its query tile; more than one: it writes partials
  std::int32_t cost = 0;        // ItemCost

  bool partial() const { return num_chunks > 1; }
  // A head's chunks follow those of the head before it.
  std::int32_t partial_row_of(std::int32_t head) const {
    return partial() ? partial_row + head * num_chunks * rows : WorkItem::kFinal;
  }
};

// Totals of one request's units, per KV head.
struct RequestWork {
  std::int32_t first_unit = 0;
  std::int32_t num_units = 0;
  std::int32_t num_kv_heads = 1;
  std::int32_t longest = 0;  // cost of its longest unit
  std::int64_t cost = 0;
  std::int64_t reused_kv_bytes = 0;  // K/V that more than one query tile reads; 0 with one tile
};

// Units of one segment, with the merges and partial rows that they need.
struct SegmentWork {
  std::int32_t first_unit = 0;
  std::int32_t num_units = 0;
  std::int32_t num_kv_heads = 1;
  std::int64_t num_merges = 0;
  std::int64_t num_partial_rows = 0;
};

// Upper bound of counted bytes: 2^60 exceed any L2, and bytes of shared pages could overflow int64.
inline constexpr std::int64_t kMostReusedBytes = std::int64_t{1} << 60;

// Units of a request are consecutive, by query tile and then by chunk.
struct WorkList {
  std::vector<WorkUnit> units;
  std::vector<RequestWork> requests;
  PerSegment<SegmentWork> segments;
  std::int64_t num_items = 0;
  std::int64_t num_kv_tiles = 0;     // over all items
  std::int64_t cost = 0;             // over all items
  std::int64_t reused_kv_bytes = 0;  // over all requests and heads, at most kMostReusedBytes
  std::int32_t longest = 0;
  std::int32_t most_units = 0;  // of one request

  bool costs_are_equal() const { return cost == num_items * longest; }
};

// Rows and keys of one tile.
struct TileExtent {
  QueryGrid grid;
  std::int32_t keys = 0;
};

// One segment while it is planned. Its requests are numbered from first_request on.
struct SegmentPlan {
  const SegmentProblem& problem;
  std::span<const RequestInfo> requests;
  std::int32_t first_request = 0;
  TileExtent tile;
  ChunkOrigin origin;
  ItemCost cost;
};

// Query tiles of one KV head: their number over all requests, and a list in which each may stand
// for those of several requests (QueryTile::alike).
std::int64_t count_query_tiles(const SegmentPlan& segment);
std::vector<QueryTile> query_tiles(const SegmentPlan& segment);
// Replaces each tile that stands for several requests (QueryTile::alike) by one tile per request.
std::vector<QueryTile> expand_alike(std::span<const QueryTile> tiles);

// Cuts every query tile into chunks of chunk_tiles KV tiles and appends the segment to `work`. The
// caller has seen to it that items, partial rows and chunks can be numbered.
void cut(const SegmentPlan& segment, std::span<const QueryTile> tiles, std::int32_t chunk_tiles,
         WorkList& work);

}  // namespace preflash
