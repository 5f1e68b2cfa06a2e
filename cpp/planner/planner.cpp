#include "planner/planner.h"

#include <algorithm>
#include <stdexcept>

#include "planner/limits.h"
#include "planner/message.h"
#include "preflash/mask_tiles.h"

namespace preflash {
namespace {

// CTAs, or clusters of CTAs that share an item, that the machine holds at once: as many as the
// launch bounds promise and shared memory has room for (the system takes 1 KiB per CTA). Each runs
// items of every segment.
std::int64_t slots_of(const DeviceFacts& facts, const SegmentKernels& kernels) {
  std::int64_t per_sm = kernels[0]->tile.ctas_per_sm;
  for (const ForwardKernel* kernel : kernels) {
    per_sm = std::min<std::int64_t>(per_sm, kernel->tile.ctas_per_sm);
    if (facts.smem_per_sm > 0 && kernel->smem_bytes > 0) {
      per_sm = std::min<std::int64_t>(per_sm, facts.smem_per_sm / (kernel->smem_bytes + 1024));
    }
  }
  return std::max<std::int64_t>(facts.num_sms * per_sm / kernels[0]->ctas_per_item, 1);
}

// Number of equally long CTAs beyond which more gain nothing. CTAs of short tiles that read 16 bits
// as stored share an SM's part of the bandwidth: one on each SM is enough to use it.
std::int64_t full_slots_of(const DeviceFacts& facts, const SegmentKernels& kernels) {
  const Variant& variant = kernels[0]->variant;
  const bool reads = kernels[0]->traits.short_tiles == ShortTiles::kOwn &&
                     variant.tile_class == TileClass::kDecode && variant.load == Load::kDirect;
  const std::int64_t slots = slots_of(facts, kernels);
  return reads ? std::min<std::int64_t>(std::max(facts.num_sms, 1), slots) : slots;
}

// KV tiles per chunk that the caller asks for, or kUnsplit; 0: the planner chooses.
// In one pass a request is not split, whatever fixed_split_size says: serving engines set
// disable_split_kv and fixed_split_size at once.
std::int32_t asked_chunk(const SegmentProblem& problem, std::int32_t tile_n) {
  const bool moves = problem.lengths_are_upper_bounds && problem.reach() >= 0;
  if (problem.split.is_one_pass() || (moves && !problem.chunks_begin_at_window())) return kUnsplit;
  return ceil_div(std::min(problem.split.fixed_split_size, kMaxRequestLength), tile_n);
}

std::int32_t longest_of(std::span<const QueryTile> tiles) {
  std::int32_t longest = 0;
  for (const QueryTile& tile : tiles) longest = std::max(longest, tile.kv_tiles());
  return longest;
}

}  // namespace

Schedule schedule_for(const FamilyTraits& family, const Problem& problem, PlannerOptions options) {
  if (options.schedule != Schedule::kAuto) return options.schedule;
  return problem.segments[0].graph_max_rows > 0 ? Schedule::kPersistent : family.schedule;
}

Planner::Planner(const Problem& problem, const DeviceFacts& facts, const SegmentKernels& kernels,
                 PlannerOptions options)
    : is_first_(options.first_tile == 0) {
  const Schedule schedule_kind = schedule_for(kernels[0]->traits, problem, options);
  if (problem.segments[0].graph_max_rows > 0 && schedule_kind == Schedule::kOnePerItem) {
    refuse("schedule: a CUDA graph needs a fixed number of CTAs, so it cannot run one per item");
  }
  const std::int64_t cta_slots = slots_of(facts, kernels);
  for (int s = 0; s < problem.segments.size(); ++s) {
    read_segment(problem.segments[s], *kernels[s]);
  }
  split(problem, {.all = cta_slots, .full = full_slots_of(facts, kernels)}, kernels,
        options.first_tile);
  schedule(problem, facts, cta_slots, schedule_kind);
  count();
}

void Planner::read_segment(const SegmentProblem& problem, const ForwardKernel& kernel) {
  const std::int32_t index = segments_.size();
  Segment& segment = segments_.add(
      {.first_request = static_cast<std::int32_t>(requests_.size()),
       .num_requests = static_cast<std::int32_t>(problem.qo_indptr.size()) - 1,
       .num_kv_heads = problem.num_kv_heads,
       .head_dim_vo = problem.head_dim_vo,
       .mask = problem.mask,
       .tile = {.grid = kernel.query_grid(index, problem), .keys = kernel.tile_of(index).n}});
  requests_.resize(requests_.size() + segment.num_requests);
  for (std::int32_t i = 0; i < segment.num_requests; ++i) {
    RequestInfo& info = requests_[segment.first_request + i];
    info.qo_begin = problem.qo_indptr[i];
    info.qo_len = problem.qo_indptr[i + 1] - info.qo_begin;
    info.kv_begin = problem.kv_begin(i);
    info.kv_len = static_cast<std::int32_t>(problem.kv_len(i));
    if (problem.mask == Mask::kCustom) info.mask_begin = problem.mask_indptr[i];
    info.segment = index;
  }
  if (is_first_ && problem.mask == Mask::kCustom && kernel.mask_tile_use == MaskTileUse::kUsed) {
    count_mask_tiles(problem, segment);
  }
}

void Planner::count_mask_tiles(const SegmentProblem& problem, Segment& segment) const {
  const MaskTilesShape shape{.rows_per_tile = segment.tile.grid.rows_per_tile,
                             .tile_keys = segment.tile.keys,
                             .group_size = segment.tile.grid.group_size};
  segment.mask_tiles_begin.assign(1, 0);
  for (std::int32_t i = 0; i < segment.num_requests; ++i) {
    const RequestInfo& info = requests_[segment.first_request + i];
    segment.mask_tiles_begin.push_back(segment.mask_tiles_begin.back() + shape.words(info));
  }
  segment.mask_tiles_capacity = segment.mask_tiles_begin.back();
  if (problem.graph_max_rows > 0) {
    const std::int64_t most =
        shape.most_words(segment.num_requests, problem.graph_max_rows, problem.graph_mask_bytes);
    segment.mask_tiles_capacity = std::max(segment.mask_tiles_capacity, most);
  }
}

void Planner::split(const Problem& problem, CtaSlots slots, const SegmentKernels& kernels,
                    std::int64_t first_tile) {
  std::vector<SegmentPlan> plans;
  std::int64_t items = 0;
  for (int s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    plans.push_back(
        {.problem = problem.segments[s],
         .requests = std::span(requests_).subspan(segment.first_request, segment.num_requests),
         .first_request = segment.first_request,
         .tile = segment.tile,
         .origin = kernels[s]->chunk_origin(s, problem.segments[s]),
         .cost = item_cost(kernels[s]->traits, segment.tile.keys)});
    // Before anything is added up: with 2^31 items at most, no cost below comes near 2^63.
    const std::int64_t num_tiles = count_query_tiles(plans[s]);
    items += num_tiles * segment.num_kv_heads;
    check_item_count(problem.segments[s], num_tiles, items);
  }

  std::vector<QueryTile> tiles[kMaxSegments];
  SplitProblem decision{.cta_slots = slots.all,
                        .full_slots = slots.full,
                        .limits = split_limits(problem, plans, slots.all)};
  for (int s = 0; s < segments_.size(); ++s) {
    tiles[s] = query_tiles(plans[s]);
    decision.segments.add(
        {.tiles = tiles[s],
         .longest = longest_of(tiles[s]),
         .num_kv_heads = segments_[s].num_kv_heads,
         .head_dim_vo = segments_[s].head_dim_vo,
         .tile_n = segments_[s].tile.keys,
         .asked_chunk = asked_chunk(problem.segments[s], segments_[s].tile.keys)});
  }
  if (segments_.size() == 1 && problem.segments[0].graph_max_rows == 0) {
    take_tiles(problem, first_tile, tiles[0], decision);
  }
  cut_into_chunks(problem, plans, decision);
}

// Keeps the query tiles of this launch in `tiles` and `decision`. This launch and those that follow
// share the remaining partial rows evenly.
void Planner::take_tiles(const Problem& problem, std::int64_t first_tile,
                         std::vector<QueryTile>& tiles, SplitProblem& decision) {
  SplitSegment& split = decision.segments[0];
  if (split.asked_chunk == 0 || split.asked_chunk == kUnsplit) return;
  const SegmentEstimate all = estimate(decision, kUnsplit).segments[0];
  const std::int64_t room = decision.limits.segments[0].rows;
  if (first_tile == 0 && (all.num_partial_rows <= room || all.num_chunks > kMaxChunks)) return;
  check_item_count(problem.segments[0], all.num_items / split.num_kv_heads, all.num_items);

  const auto rows_of = [&](const QueryTile& tile) {
    return split.partial_rows(tile, split.asked_chunk);
  };
  std::int64_t most = 0;
  for (const QueryTile& tile : tiles) most = std::max(most, rows_of(tile));
  check_rounds(problem.segments[0], decision.limits, all.num_partial_rows, most);

  tiles = expand_alike(tiles);
  tiles.erase(tiles.begin(), tiles.begin() + first_tile);
  std::int64_t left = 0;
  for (const QueryTile& tile : tiles) left += rows_of(tile);
  const std::int64_t share = ceil_div(left, std::max<std::int64_t>(ceil_div(left, room), 1));
  std::int64_t rows = 0;
  std::int64_t count = 0;
  for (; count < std::ssize(tiles); ++count) {
    const std::int64_t more = rows_of(tiles[count]);
    if (more > 0 && (rows + more > room || (rows > 0 && rows >= share))) break;
    rows += more;
  }
  if (count < std::ssize(tiles)) end_tile_ = first_tile + count;
  tiles.resize(count);
  split.tiles = tiles;
  split.longest = longest_of(tiles);
}

void Planner::cut_into_chunks(const Problem& problem, std::span<const SegmentPlan> plans,
                              const SplitProblem& decision) {
  const auto is_fixed = [](const SplitSegment& segment) {
    return segment.asked_chunk > 0 && segment.asked_chunk != kUnsplit;
  };
  if (std::ranges::any_of(decision.segments, is_fixed)) {
    // A fixed split takes the place of kUnsplit in the segments that have one.
    check_fixed_splits(problem, decision.limits, estimate(decision, kUnsplit));
  }
  const std::int32_t chosen = choose_chunk_tiles(decision);
  for (int s = 0; s < segments_.size(); ++s) {
    const SplitSegment& split = decision.segments[s];
    const std::int32_t chunk_tiles = split.chunk_tiles(chosen);
    const Segment& segment = segments_[s];
    const std::int32_t tiles =
        chunk_tiles == kUnsplit ? ceil_div(kWholeRequest, split.tile_n) : chunk_tiles;
    const std::int32_t chunk_keys = tiles * split.tile_n;
    for (std::int32_t r = 0; r < segment.num_requests; ++r) {
      requests_[segment.first_request + r].chunk_keys = chunk_keys;
    }
    cut(plans[s], split.tiles, chunk_tiles, work_);
  }
  reserve(problem, decision.limits);
}

void Planner::reserve(const Problem& problem, const SplitLimits& limits) {
  const bool graph = problem.segments[0].graph_max_rows > 0;
  bool fits = work_.num_items <= limits.items;
  item_capacity_ = graph ? limits.items : work_.num_items;
  for (int s = 0; s < segments_.size(); ++s) {
    const SegmentWork& used = work_.segments[s];
    const SegmentLimits& room = limits.segments[s];
    fits = fits && used.num_partial_rows <= room.rows && used.num_merges <= room.merges;
    segments_[s].capacity =
        graph ? room : SegmentLimits{.rows = used.num_partial_rows, .merges = used.num_merges};
  }
  if (!fits) throw std::logic_error("the planner used more than it has, or reserved");
}

void Planner::schedule(const Problem& problem, const DeviceFacts& facts, std::int64_t cta_slots,
                       Schedule schedule) {
  // Under a custom mask the costs are guesses, and lists of several sections do not balance a wrong
  // guess: a CTA that got early rows in one section may get early rows in the next.
  const bool guesses = schedule == Schedule::kPersistent &&
                       std::ranges::any_of(segments_, [](const Segment& segment) {
                         return segment.mask == Mask::kCustom;
                       });
  order_ = order_units(work_, {.cta_slots = cta_slots, .l2_bytes = guesses ? 0 : facts.l2_bytes});
  if (schedule == Schedule::kPersistent) {
    const auto num_ctas = static_cast<std::int32_t>(std::min(cta_slots, item_capacity_));
    // A CUDA graph has a fixed grid.
    const bool graph = problem.segments[0].graph_max_rows > 0;
    assignment_ =
        assign(work_, order_,
               {.num_ctas = num_ctas, .late_cost = graph ? 0 : late_cost_of(work_, num_ctas)});
    sizes_.num_ctas = assignment_.num_ctas();
    sizes_.makespan_kv_tiles = ceil_div(assignment_.makespan, std::int64_t{ItemCost::kTile});
    return;
  }
  CostHistogram costs(work_.longest);
  for (int s = 0; s < segments_.size(); ++s) {
    const SegmentWork& segment = work_.segments[s];
    const auto units = std::span(work_.units).subspan(segment.first_unit, segment.num_units);
    for (const WorkUnit& unit : units) costs.add(unit.cost, segments_[s].num_kv_heads);
  }
  sizes_.num_ctas = static_cast<int>(work_.num_items);
  sizes_.makespan_kv_tiles = ceil_div(costs.makespan(cta_slots), std::int64_t{ItemCost::kTile});
}

void Planner::count() {
  sizes_.num_requests = static_cast<int>(requests_.size());
  sizes_.num_items = static_cast<int>(work_.num_items);
  for (int s = 0; s < segments_.size(); ++s) {
    const SegmentLimits& capacity = segments_[s].capacity;
    sizes_.segments[s] = {.num_merges = static_cast<int>(capacity.merges),
                          .num_partial_rows = static_cast<int>(capacity.rows),
                          .num_mask_tile_words = segments_[s].mask_tiles_capacity};
  }
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
  if (is_first_) {
    layout.requests = ints.take<RequestInfo>(std::ssize(requests_), [&](RequestInfo* requests) {
      std::copy(requests_.begin(), requests_.end(), requests);
    });
  }
  layout.items = ints.take<WorkItem>(item_capacity_, [&](WorkItem* items) { write_items(items); });
  if (assignment_.present()) {
    const std::vector<std::int32_t>& cta_begin = assignment_.cta_begin;
    layout.cta_begin = ints.take<std::int32_t>(std::ssize(cta_begin), [&](std::int32_t* out) {
      std::copy(cta_begin.begin(), cta_begin.end(), out);
    });
  }
  for (int s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    SegmentLayout& place = layout.segments[s];
    if (segment.capacity.merges > 0) {
      place.merges = ints.take<MergeItem>(segment.capacity.merges, [&](MergeItem* merges) {
        write_merges(segment, work_.segments[s], merges);
      });
    }
    if (segment.capacity.rows > 0) {
      place.partial_o = floats.take<float>(segment.capacity.rows * segment.head_dim_vo);
      place.partial_lse = floats.take<PartialLse>(segment.capacity.rows);
    }
    if (!segment.mask_tiles_begin.empty()) {
      place.mask_tiles_begin = ints.take<std::int64_t>(
          std::ssize(segment.mask_tiles_begin),
          [&](std::int64_t* begin) { std::ranges::copy(segment.mask_tiles_begin, begin); });
      place.mask_tiles = ints.take<std::uint32_t>(segment.mask_tiles_capacity);
    }
  }
  layout.int_bytes = ints.bytes();
  layout.float_bytes = floats.bytes();
}

namespace {

WorkItem item_of(const WorkUnit& unit, int head) {
  return {.request = unit.request,
          .row_begin = unit.row_begin,
          .kv_head = static_cast<std::int16_t>(head),
          .chunk = unit.chunk,
          .partial_row = unit.partial_row_of(head)};
}

// Returns the number of heads of every unit if all units have the same heads and no request has a
// second unit: item i is then an item of unit i / heads. Otherwise returns 0.
std::int32_t heads_of_each(const WorkList& work, std::span<const OrderedUnit> order) {
  if (work.most_units > 1 || order.empty()) return 0;
  const OrderedUnit& first = order.front();
  std::int32_t differ = 0;
  for (const OrderedUnit& one : order) {
    differ |= (one.head_begin ^ first.head_begin) | (one.head_end ^ first.head_end);
  }
  return differ == 0 ? first.heads() : 0;
}

// An item of an order in which every unit has so many heads.
struct ItemPlace {
  std::int64_t unit;
  std::int32_t head;

  static ItemPlace of(std::int32_t item, std::int32_t heads) {
    return {item / heads, item % heads};
  }
  void advance(const ItemPlace& by, std::int32_t heads) {
    unit += by.unit;
    head += by.head;
    if (head < heads) return;
    head -= heads;
    ++unit;
  }
};

}  // namespace

// A few lists at a time. All lists at once are more cache lines than a core can hold in memory that
// a GPU has read; one list at a time reads units all over the order.
void Planner::write_lists_in_turns(std::int32_t heads, WorkItem* items) const {
  constexpr std::int32_t kListsAtOnce = 8;
  const std::int32_t num_ctas = assignment_.num_ctas();
  for (std::int32_t begin = 0; begin < num_ctas; begin += kListsAtOnce) {
    const std::int32_t lists = std::min(kListsAtOnce, num_ctas - begin);
    // From these CTAs' items in one turn to those in the next one, from the far end and back.
    const std::int32_t distances[] = {2 * (num_ctas - begin) - lists, 2 * begin + lists};
    const ItemPlace ahead[] = {ItemPlace::of(distances[0], heads),
                               ItemPlace::of(distances[1], heads)};
    ItemPlace first = ItemPlace::of(begin, heads);
    std::int64_t left = work_.num_items - begin;
    for (std::int32_t turn = 0; left > 0; ++turn) {
      const bool back = turn % 2 != 0;
      const auto count = static_cast<std::int32_t>(std::min<std::int64_t>(lists, left));
      ItemPlace at = first;
      for (std::int32_t i = 0; i < count; ++i) {
        const std::int32_t cta = back ? begin + lists - 1 - i : begin + i;
        const OrderedUnit& ordered = order_[at.unit];
        items[assignment_.cta_begin[cta] + turn] =
            item_of(work_.units[ordered.unit], ordered.head_begin + at.head);
        at.advance({0, 1}, heads);
      }
      first.advance(ahead[turn % 2], heads);
      left -= distances[turn % 2];
    }
  }
}

void Planner::write_items(WorkItem* items) const {
  std::fill(items + work_.num_items, items + item_capacity_, WorkItem{});
  if (!assignment_.present()) {
    for_each_item(work_, order_,
                  [&](const WorkUnit& unit, int head) { *items++ = item_of(unit, head); });
    return;
  }
  const bool in_turns = assignment_.cta_of_item.empty();
  if (const std::int32_t heads = in_turns ? heads_of_each(work_, order_) : 0; heads > 0) {
    return write_lists_in_turns(heads, items);
  }
  std::vector<std::int32_t> next(assignment_.cta_begin.begin(), assignment_.cta_begin.end() - 1);
  if (in_turns) {
    BackAndForth turns(assignment_.num_ctas());
    for_each_item(work_, order_, [&](const WorkUnit& unit, int head) {
      items[next[turns.next()]++] = item_of(unit, head);
    });
    return;
  }
  const std::int32_t* cta = assignment_.cta_of_item.data();
  for_each_item(work_, order_, [&](const WorkUnit& unit, int head) {
    items[next[*cta++]++] = item_of(unit, head);
  });
}

void Planner::write_merges(const Segment& segment, const SegmentWork& work,
                           MergeItem* merges) const {
  MergeItem* next = merges;
  const std::int32_t end = work.first_unit + work.num_units;
  for (std::int32_t i = work.first_unit; i < end; i += work_.units[i].num_chunks) {
    const WorkUnit& first = work_.units[i];
    if (!first.partial()) continue;
    for (std::int32_t head = 0; head < segment.num_kv_heads; ++head) {
      *next++ = {.request = first.request,
                 .row_begin = first.row_begin,
                 .kv_head = static_cast<std::int16_t>(head),
                 .num_chunks = first.num_chunks,
                 .first_row = first.partial_row_of(head)};
    }
  }
  if (next == merges + segment.capacity.merges) return;
  // Surplus merges of a CUDA graph: no chunks, and rows past the end of the first request.
  const QueryGrid& grid = segment.tile.grid;
  const RequestInfo& first_request = requests_[segment.first_request];
  const std::int32_t end_row = first_request.qo_len * grid.group_size + grid.rows_per_tile;
  std::fill(next, merges + segment.capacity.merges,
            MergeItem{.request = segment.first_request, .row_begin = end_row});
}

}  // namespace preflash
