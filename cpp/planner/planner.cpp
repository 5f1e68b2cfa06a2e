#include "planner/planner.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "planner/message.h"

namespace preflash {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

std::int64_t float_bytes(std::int64_t partial_rows, std::int32_t head_dim_vo) {
  Arena arena;
  arena.take<float>(partial_rows * head_dim_vo);
  arena.take<PartialLse>(partial_rows);
  return arena.bytes();
}

// CTAs that the machine holds at once: what the launch bounds promise, as far as shared memory
// reaches (1 KiB of it a CTA is the system's).
std::int64_t slots_of(const DeviceFacts& facts, const ForwardKernel& kernel) {
  std::int64_t per_sm = kernel.tile.ctas_per_sm;
  if (facts.smem_per_sm > 0 && kernel.smem_bytes > 0) {
    per_sm = std::min<std::int64_t>(per_sm, facts.smem_per_sm / (kernel.smem_bytes + 1024));
  }
  return std::max<std::int64_t>(facts.num_sms * per_sm, 1);
}

// Partial rows that the float workspace has room for.
std::int64_t rows_in(std::int64_t bytes, std::int32_t head_dim_vo) {
  const std::int64_t row_bytes = head_dim_vo * sizeof(float) + sizeof(PartialLse);
  std::int64_t rows = std::min(bytes / row_bytes, kMaxInt32);
  if (rows > 0 && float_bytes(rows, head_dim_vo) > bytes) --rows;  // alignment
  return rows;
}

// The most query tiles, over all KV heads, of any batch of this size with at most graph_max_rows
// tokens: with k non-empty requests, sum of ceil(rows_i / m) <= (sum of rows_i + k * (m - 1)) / m,
// where m is the rows of one tile.
std::int64_t most_graph_tiles(const Problem& problem, std::int32_t tile_rows) {
  const std::int64_t group = problem.num_qo_heads / problem.num_kv_heads;
  const std::int64_t batch = static_cast<std::int64_t>(problem.qo_indptr.size()) - 1;
  const std::int64_t rows = problem.graph_max_rows * group;
  const std::int64_t requests = std::min<std::int64_t>(batch, problem.graph_max_rows);
  if (requests == 0) return 0;
  return (rows + requests * (tile_rows - 1)) / tile_rows * problem.num_kv_heads;
}

// What a batch may use at most.
SplitLimits split_limits(const Problem& problem, std::int32_t tile_rows, std::int64_t cta_slots) {
  SplitLimits limits{.rows = 0, .items = kMaxInt32, .merges = kMaxInt32};
  if (!problem.split.disable) {
    limits.rows = rows_in(problem.float_workspace_bytes, problem.head_dim_vo);
  }
  if (problem.graph_max_rows == 0) return limits;
  // The rows of every tile are a multiple of this, so that rows bound the number of chunks.
  const std::int32_t group = problem.num_qo_heads / problem.num_kv_heads;
  std::int64_t chunks = limits.rows / std::gcd(group, tile_rows);
  // How far a later plan splits depends on KV lengths that nobody knows yet. Two waves of partial
  // tiles are as much as an automatic split gains from; a fixed split may need all that there is.
  if (problem.split.fixed_split_size == 0) {
    chunks = std::min(chunks, 2 * cta_slots);
    limits.rows = std::min(limits.rows, 2 * cta_slots * tile_rows);
  }
  const std::int64_t most_tiles = most_graph_tiles(problem, tile_rows);
  limits.items = most_tiles + chunks;
  limits.merges = std::min(most_tiles, chunks / 2);
  if (limits.items > kMaxInt32) {
    refuse("graph_max_rows = ", problem.graph_max_rows, ": a CUDA graph would reserve ",
           limits.items, " work items; at most ", kMaxInt32, ": plan for smaller batches");
  }
  return limits;
}

void check_item_count(const Problem& problem, std::int64_t items_per_head) {
  if (items_per_head > kMaxInt32 / problem.num_kv_heads) {
    refuse("qo_indptr[-1] - qo_indptr[0] = ", problem.qo_indptr.back() - problem.qo_indptr.front(),
           ": the batch makes ", items_per_head, " work items for each of ", problem.num_kv_heads,
           " KV heads; at most ", kMaxInt32, " in all: plan it in several parts");
  }
}

// A fixed split is a promise about results, so it is kept or refused, never weakened.
void check_fixed_split(const Problem& problem, const SplitLimits& limits,
                       const SplitEstimate& needed) {
  const std::int32_t size = problem.split.fixed_split_size;
  if (needed.num_chunks > kMaxChunks) {
    refuse("fixed_split_size = ", size, " cuts a request into ", needed.num_chunks,
           " KV chunks; at most ", kMaxChunks, ": use a larger one or disable_split_kv");
  }
  check_item_count(problem, needed.num_items / problem.num_kv_heads);
  if (needed.num_partial_rows > kMaxInt32) {
    refuse("fixed_split_size = ", size, " makes ", needed.num_partial_rows,
           " partial rows of the batch; at most ", kMaxInt32,
           ": use a larger one or disable_split_kv, or plan the batch in several parts");
  }
  if (needed.num_partial_rows > limits.rows) {
    refuse("float_workspace_buffer has ", problem.float_workspace_bytes,
           " bytes; fixed_split_size = ", size, " needs ",
           float_bytes(needed.num_partial_rows, problem.head_dim_vo), " bytes for ",
           needed.num_partial_rows, " partial rows of head_dim_vo = ", problem.head_dim_vo,
           ": enlarge it, use a larger fixed_split_size or disable_split_kv");
  }
}

}  // namespace

Schedule schedule_for(const FamilyTraits& family, const Problem& problem, PlannerOptions options) {
  if (options.schedule != Schedule::kAuto) return options.schedule;
  return problem.graph_max_rows > 0 ? Schedule::kPersistent : family.schedule;
}

Planner::Planner(const Problem& problem, const DeviceFacts& facts, const ForwardKernel& kernel,
                 PlannerOptions options)
    : num_kv_heads_(problem.num_kv_heads), tile_(kernel.tile), head_dim_vo_(problem.head_dim_vo) {
  validate(problem);
  group_size_ = problem.num_qo_heads / problem.num_kv_heads;
  tile_rows_ = rows_per_tile(kernel.traits.tile_rows, tile_.m, group_size_);
  const Schedule schedule_kind = schedule_for(kernel.traits, problem, options);
  if (problem.graph_max_rows > 0 && schedule_kind == Schedule::kOnePerItem) {
    refuse("schedule: a CUDA graph needs a fixed number of CTAs, so it cannot run one per item");
  }
  const std::int64_t cta_slots = slots_of(facts, kernel);
  read_requests(problem);
  split(problem, cta_slots, item_cost(kernel.traits, tile_.n));
  schedule(facts, cta_slots, schedule_kind);
  count();
}

void Planner::read_requests(const Problem& problem) {
  requests_.resize(problem.qo_indptr.size() - 1);
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    RequestInfo& info = requests_[i];
    info.qo_begin = problem.qo_indptr[i];
    info.qo_len = problem.qo_indptr[i + 1] - info.qo_begin;
    info.kv_begin = problem.kv_indptr[i];
    info.kv_len = static_cast<std::int32_t>(problem.kv_len(i));
    if (problem.mask == Mask::kCustom) info.mask_begin = problem.mask_indptr[i];
  }
}

void Planner::split(const Problem& problem, std::int64_t cta_slots, const ItemCost& cost) {
  const TileExtent extent{.rows = tile_rows_, .keys = tile_.n};
  // Before anything is added up: with 2^31 items at most, no cost below comes near 2^63.
  check_item_count(problem, count_query_tiles(problem, requests_, extent));
  const std::vector<QueryTile> tiles = query_tiles(problem, requests_, extent);
  capacity_ = split_limits(problem, tile_rows_, cta_slots);
  std::int32_t longest = 0;
  for (const QueryTile& tile : tiles) longest = std::max(longest, tile.kv_tiles());
  const SplitProblem decision{.tiles = tiles,
                              .longest = longest,
                              .num_kv_heads = num_kv_heads_,
                              .cta_slots = cta_slots,
                              .tile_n = tile_.n,
                              .limits = capacity_};
  std::int32_t chunk_tiles = kUnsplit;
  if (problem.split.disable) {
    // Stays whole, whatever fixed_split_size says: both promise results that no batch changes, and
    // serving engines ask for both at once.
  } else if (problem.split.fixed_split_size > 0) {
    const std::int32_t size = std::min(problem.split.fixed_split_size, kMaxRequestLength);
    chunk_tiles = ceil_div(size, tile_.n);
    check_fixed_split(problem, capacity_, estimate(decision, chunk_tiles));
  } else {
    chunk_tiles = choose_chunk_tiles(decision);
  }

  for (RequestInfo& info : requests_) {
    const std::int32_t kv_tiles = ceil_div(std::max(info.kv_len, 1), tile_.n);
    info.chunk_keys = (chunk_tiles == kUnsplit ? kv_tiles : chunk_tiles) * tile_.n;
  }
  work_ = cut(tiles, problem, requests_, chunk_tiles, cost);
  if (problem.graph_max_rows == 0) {
    capacity_ = {
        .rows = work_.num_partial_rows, .items = work_.num_items, .merges = work_.num_merges};
  } else if (work_.num_partial_rows > capacity_.rows || work_.num_items > capacity_.items ||
             work_.num_merges > capacity_.merges) {
    throw std::logic_error("the planner reserved too little for a CUDA graph");
  }
}

void Planner::schedule(const DeviceFacts& facts, std::int64_t cta_slots, Schedule schedule) {
  order_ = order_units(
      work_, {.num_kv_heads = num_kv_heads_, .cta_slots = cta_slots, .l2_bytes = facts.l2_bytes});
  if (schedule == Schedule::kPersistent) {
    const std::int64_t num_ctas = std::min(cta_slots, capacity_.items);
    assignment_ = assign(work_, order_, static_cast<std::int32_t>(num_ctas));
    sizes_.num_ctas = static_cast<int>(num_ctas);
    sizes_.makespan_kv_tiles = ceil_div(assignment_.makespan, std::int64_t{ItemCost::kTile});
    return;
  }
  CostHistogram costs(work_.longest, num_kv_heads_);
  for (const WorkUnit& unit : work_.units) costs.add(unit.cost);
  sizes_.num_ctas = static_cast<int>(work_.num_items);
  sizes_.makespan_kv_tiles = ceil_div(costs.makespan(cta_slots), std::int64_t{ItemCost::kTile});
}

void Planner::count() {
  sizes_.num_requests = static_cast<int>(requests_.size());
  sizes_.num_items = static_cast<int>(work_.num_items);
  sizes_.num_merges = static_cast<int>(capacity_.merges);
  sizes_.num_partial_rows = static_cast<int>(capacity_.rows);
  sizes_.num_kv_tiles = work_.num_kv_tiles;
  Arena ints;
  Arena floats;
  lay_out(ints, floats, layout_);
}

void Planner::write(void* image) const {
  Arena ints(image);
  Arena floats;
  PlanLayout layout;
  lay_out(ints, floats, layout);
}

void Planner::lay_out(Arena& ints, Arena& floats, PlanLayout& layout) const {
  layout.requests = ints.take<RequestInfo>(std::ssize(requests_), [&](RequestInfo* requests) {
    std::copy(requests_.begin(), requests_.end(), requests);
  });
  layout.items = ints.take<WorkItem>(capacity_.items, [&](WorkItem* items) { write_items(items); });
  if (assignment_.present()) {
    const std::vector<std::int32_t>& cta_begin = assignment_.cta_begin;
    layout.cta_begin = ints.take<std::int32_t>(std::ssize(cta_begin), [&](std::int32_t* out) {
      std::copy(cta_begin.begin(), cta_begin.end(), out);
    });
  }
  if (capacity_.merges > 0) {
    layout.merges =
        ints.take<MergeItem>(capacity_.merges, [&](MergeItem* merges) { write_merges(merges); });
  }
  layout.int_bytes = ints.bytes();

  if (capacity_.rows > 0) {
    layout.partial_o = floats.take<float>(capacity_.rows * head_dim_vo_);
    layout.partial_lse = floats.take<PartialLse>(capacity_.rows);
  }
  layout.float_bytes = floats.bytes();
}

void Planner::write_items(WorkItem* items) const {
  const std::int32_t* position = assignment_.present() ? assignment_.position.data() : nullptr;
  std::int32_t index = 0;
  for_each_item(work_, order_, [&](const WorkUnit& unit, int head) {
    items[position != nullptr ? position[index] : index] = {
        .request = unit.request,
        .row_begin = unit.row_begin,
        .kv_head = static_cast<std::int16_t>(head),
        .chunk = unit.chunk,
        .partial_row = unit.partial_row_of(head)};
    ++index;
  });
  std::fill(items + index, items + capacity_.items, WorkItem{});
}

void Planner::write_merges(MergeItem* merges) const {
  MergeItem* next = merges;
  for (std::size_t i = 0; i < work_.units.size(); i += work_.units[i].num_chunks) {
    const WorkUnit& first = work_.units[i];
    if (!first.partial()) continue;
    for (std::int32_t head = 0; head < num_kv_heads_; ++head) {
      *next++ = {.request = first.request,
                 .row_begin = first.row_begin,
                 .kv_head = static_cast<std::int16_t>(head),
                 .num_chunks = first.num_chunks,
                 .first_row = first.partial_row_of(head)};
    }
  }
  if (next == merges + capacity_.merges) return;
  // Surplus merges of a CUDA graph: no chunks, and rows that begin where request 0 ends.
  const std::int32_t end_row = requests_[0].qo_len * group_size_;
  std::fill(next, merges + capacity_.merges, MergeItem{.request = 0, .row_begin = end_row});
}

}  // namespace preflash
