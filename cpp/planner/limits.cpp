#include "planner/limits.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "planner/message.h"

namespace preflash {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// Partial rows that the float workspace has room for.
std::int64_t rows_in(std::int64_t bytes, std::int32_t head_dim_vo) {
  const std::int64_t row_bytes = head_dim_vo * sizeof(float) + sizeof(PartialLse);
  std::int64_t rows = std::min(bytes / row_bytes, kMaxInt32);
  if (rows > 0 && partial_bytes(rows, head_dim_vo) > bytes) --rows;  // alignment
  return rows;
}

// The most query tiles, over all KV heads, of any batch of this size with at most graph_max_rows
// tokens: with k non-empty requests, sum of ceil(rows_i / m) <= (sum of rows_i + k * (m - 1)) / m,
// where m is the rows of one tile. Aligned tiles have up to m - 1 rows before a request's, too.
std::int64_t most_graph_tiles(const SegmentProblem& problem, const QueryGrid& grid) {
  const std::int64_t batch = static_cast<std::int64_t>(problem.qo_indptr.size()) - 1;
  const std::int64_t rows = std::int64_t{problem.graph_max_rows} * grid.group_size;
  const std::int64_t requests = std::min<std::int64_t>(batch, problem.graph_max_rows);
  if (requests == 0) return 0;
  const std::int64_t unused = (grid.aligned ? 2 : 1) * (grid.rows_per_tile - 1);  // of a request
  return (rows + requests * unused) / grid.rows_per_tile * problem.num_kv_heads;
}

// Limits on a segment's use of a CUDA graph's room.
struct GraphLimits {
  SegmentLimits segment;
  std::int64_t items = 0;
};

GraphLimits graph_limits(const SegmentProblem& problem, std::int64_t rows, const QueryGrid& grid,
                         std::int64_t cta_slots) {
  // The rows of every tile are a multiple of this, so that rows bound the number of chunks.
  std::int64_t chunks = rows / std::gcd(grid.group_size, grid.rows_per_tile);
  // Later plans split by KV lengths that are still unknown. An automatic split gains from at most
  // two waves of partial tiles; a fixed split may need all the room.
  if (problem.split.fixed_split_size == 0) {
    chunks = std::min(chunks, 2 * cta_slots);
    rows = std::min(rows, 2 * cta_slots * grid.rows_per_tile);
  }
  const std::int64_t most_tiles = most_graph_tiles(problem, grid);
  return {.segment = {.rows = rows, .merges = std::min(most_tiles, chunks / 2)},
          .items = most_tiles + chunks};
}

// shares: equal parts of the workspace, of which one is for these rows.
[[noreturn]] void refuse_rows(const SegmentProblem& problem, const SplitLimits& launch, int shares,
                              std::int64_t rows) {
  std::int64_t needed = shares * partial_bytes(rows, problem.head_dim_vo);
  if (launch.copy_bytes > 0) {
    needed = ceil_div(needed, kCopyAlignment) * kCopyAlignment + launch.copy_bytes;
  }
  refuse("float_workspace_buffer has ", launch.float_bytes + launch.copy_bytes,
         " bytes; fixed_split_size = ", problem.split.fixed_split_size, " needs ", needed,
         " bytes for partial results of ", rows, " rows of head_dim_vo = ", problem.head_dim_vo,
         launch.copy_bytes > 0 ? " beside copies of the operands" : "",
         ": enlarge it, use a larger fixed_split_size or disable_split_kv");
}

void check_fixed_split(const SegmentProblem& problem, const SplitLimits& launch,
                       const SegmentLimits& limits, const SegmentEstimate& needed) {
  const std::int32_t size = problem.split.fixed_split_size;
  if (needed.num_chunks > kMaxChunks) {
    refuse("fixed_split_size = ", size, " cuts a request into ", needed.num_chunks,
           " KV chunks; at most ", kMaxChunks, ": use a larger one or disable_split_kv");
  }
  check_item_count(problem, needed.num_items / problem.num_kv_heads, needed.num_items);
  if (needed.num_partial_rows > kMaxInt32) {
    refuse("fixed_split_size = ", size, " makes ", needed.num_partial_rows,
           " partial rows of the batch; at most ", kMaxInt32,
           ": use a larger one or disable_split_kv, or plan the batch in several parts");
  }
  if (needed.num_partial_rows > limits.rows) {
    const int shares = problem.graph_max_rows > 0 ? launch.segments.size() : 1;
    refuse_rows(problem, launch, shares, needed.num_partial_rows);
  }
}

}  // namespace

// Any segment of a CUDA graph's later plans may need partial rows, so each has an equal share of
// the workspace.
SplitLimits split_limits(const Problem& problem, std::span<const SegmentPlan> plans,
                         std::int64_t cta_slots) {
  const bool graph = problem.segments[0].graph_max_rows > 0;
  const std::int64_t bytes = problem.float_workspace_bytes;
  SplitLimits limits{
      .items = graph ? 0 : kMaxInt32, .float_bytes = bytes, .copy_bytes = problem.copy_bytes};
  for (const SegmentPlan& plan : plans) {
    const SegmentProblem& segment = plan.problem;
    const std::int64_t share = graph ? bytes / problem.segments.size() : bytes;
    const std::int64_t rows = segment.split.is_one_pass() ? 0 : rows_in(share, segment.head_dim_vo);
    if (!graph) {
      limits.segments.add({.rows = rows, .merges = kMaxInt32});
      continue;
    }
    const GraphLimits room = graph_limits(segment, rows, plan.tile.grid, cta_slots);
    limits.segments.add(room.segment);
    limits.items += room.items;
    if (limits.items > kMaxInt32) {
      refuse("graph_max_rows = ", segment.graph_max_rows, ": a CUDA graph would reserve ",
             limits.items, " work items; at most ", kMaxInt32, ": plan for smaller batches");
    }
  }
  return limits;
}

void check_item_count(const SegmentProblem& problem, std::int64_t items_per_head,
                      std::int64_t items) {
  if (items > kMaxInt32) {
    refuse("qo_indptr[-1] - qo_indptr[0] = ", problem.qo_indptr.back() - problem.qo_indptr.front(),
           ": the batch makes ", items_per_head, " work items for each of ", problem.num_kv_heads,
           " KV heads; at most ", kMaxInt32, " in all: plan it in several parts");
  }
}

void check_rounds(const SegmentProblem& problem, const SplitLimits& limits, std::int64_t rows,
                  std::int64_t tile_rows) {
  // A launch ends where the next tile exceeds the room or an even share of the rows.
  const std::int64_t least = std::min(ceil_div(rows, kMostRounds) + tile_rows - 1, rows);
  if (least > limits.segments[0].rows) refuse_rows(problem, limits, 1, least);
}

// Segments that fit alone may not fit together.
void check_fixed_splits(const Problem& problem, const SplitLimits& limits,
                        const SplitEstimate& needed) {
  std::int64_t bytes = 0;
  for (int s = 0; s < problem.segments.size(); ++s) {
    const SegmentProblem& segment = problem.segments[s];
    if (segment.split.is_one_pass() || segment.split.fixed_split_size == 0) continue;
    check_fixed_split(segment, limits, limits.segments[s], needed.segments[s]);
    bytes += partial_bytes(needed.segments[s].num_partial_rows, segment.head_dim_vo);
  }
  if (bytes > limits.float_bytes) {
    refuse("float_workspace_buffer has ", limits.float_bytes,
           " bytes; the fixed_split_size of both segments need ", bytes,
           ": enlarge it, use a larger fixed_split_size or disable_split_kv");
  }
  if (needed.num_items > limits.items) {
    refuse("the two segments make ", needed.num_items, " work items; at most ", limits.items,
           ": plan them in several parts, or use a larger fixed_split_size");
  }
}

}  // namespace preflash
