#include "planner/order.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace preflash {
namespace {

constexpr std::int32_t kMaxBuckets = 4096;

// The units [first_unit, end_unit) for the heads [head_begin, head_end).
struct UnitGroup {
  std::int32_t first_unit = 0;
  std::int32_t end_unit = 0;
  std::int32_t head_begin = 0;
  std::int32_t head_end = 0;

  std::int64_t num_items() const {
    return std::int64_t{end_unit - first_unit} * (head_end - head_begin);
  }
};

struct Section {
  std::vector<UnitGroup> groups;
  std::int64_t num_items = 0;
  std::int64_t kv_bytes = 0;
  std::int64_t cost = 0;
  std::int32_t longest = 0;

  // True if the section can keep every slot busy for as long as its longest item.
  bool fills(std::int64_t cta_slots) const {
    return !groups.empty() && cost >= cta_slots * longest;
  }
  bool costs_are_equal() const { return cost == num_items * longest; }

  // Adds `heads` heads of one request, from `head` on.
  void add(const RequestWork& request, std::int32_t head, std::int32_t heads) {
    append({.first_unit = request.first_unit,
            .end_unit = request.first_unit + request.num_units,
            .head_begin = head,
            .head_end = head + heads});
    kv_bytes = std::min(kv_bytes + heads * request.reused_kv_bytes, kMostReusedBytes);
    cost += heads * request.cost;
    longest = std::max(longest, request.longest);
  }
  void add(const Section& other) {
    for (const UnitGroup& group : other.groups) append(group);
    kv_bytes = std::min(kv_bytes + other.kv_bytes, kMostReusedBytes);
    cost += other.cost;
    longest = std::max(longest, other.longest);
  }
  void append(const UnitGroup& group) {
    num_items += group.num_items();
    if (!groups.empty() && groups.back().first_unit == group.first_unit &&
        groups.back().head_end == group.head_begin) {
      groups.back().head_end = group.head_end;
    } else {
      groups.push_back(group);
    }
  }
};

Section everything(const WorkList& work) {
  Section section;
  for (int s = 0; s < work.segments.size(); ++s) {
    const SegmentWork& segment = work.segments[s];
    section.append({.first_unit = segment.first_unit,
                    .end_unit = segment.first_unit + segment.num_units,
                    .head_begin = 0,
                    .head_end = segment.num_kv_heads});
  }
  section.kv_bytes = work.reused_kv_bytes;
  section.cost = work.cost;
  section.longest = work.longest;
  return section;
}

// A section's K/V is read from memory while its longest items run. Half a MiB in the time of a KV
// tile, a sixth of an H100's bandwidth, leaves room for Q, O and the section that comes next.
constexpr std::int64_t kBytesPerKvTile = std::int64_t{1} << 19;

// Limits of a section, by its longest item: the K/V that it may hold, and the fraction 1 / parts of
// that item's time for which it has to keep the machine busy before it closes.
struct SectionLimit {
  std::int64_t kv_bytes = 0;
  std::int64_t parts = 1;

  SectionLimit(std::int64_t l2_bytes, std::int32_t longest) {
    // The L2 of large GPUs is two halves that keep copies of each other's lines, and Q and O pass
    // through it as well.
    kv_bytes = l2_bytes * 5 / 8;
    // Short items: sections then run into each other, several at a time.
    const std::int64_t in_time = longest * kBytesPerKvTile / ItemCost::kTile;
    if (in_time < kv_bytes) {
      kv_bytes = in_time;
      parts = 4;
    }
  }
  bool closes(const Section& section, std::int64_t cta_slots) const {
    return section.fills(ceil_div(cta_slots, parts));
  }
};

std::vector<Section> sections(const WorkList& work, const OrderProblem& problem) {
  Section whole = everything(work);
  if (problem.l2_bytes <= 0 ||
      whole.kv_bytes <= SectionLimit(problem.l2_bytes, whole.longest).kv_bytes) {
    return {std::move(whole)};
  }

  std::vector<std::int32_t> longest_first;
  longest_first.reserve(work.requests.size());
  for (std::size_t r = 0; r < work.requests.size(); ++r) {
    if (work.requests[r].num_units > 0) longest_first.push_back(static_cast<std::int32_t>(r));
  }
  std::stable_sort(longest_first.begin(), longest_first.end(), [&](auto a, auto b) {
    return work.requests[a].longest > work.requests[b].longest;
  });

  std::vector<Section> result(1);
  for (std::int32_t r : longest_first) {
    const RequestWork& request = work.requests[r];
    const SectionLimit limit(problem.l2_bytes, request.longest);
    for (std::int32_t head = 0; head < request.num_kv_heads;) {
      const std::int64_t left = request.num_kv_heads - head;
      const std::int64_t room = limit.kv_bytes - result.back().kv_bytes;
      std::int64_t heads = request.reused_kv_bytes > 0 ? room / request.reused_kv_bytes : left;
      if (heads <= 0 && limit.closes(result.back(), problem.cta_slots)) {
        result.emplace_back();
        continue;
      }
      heads = std::clamp<std::int64_t>(heads, 1, left);
      result.back().add(request, head, static_cast<std::int32_t>(heads));
      head += static_cast<std::int32_t>(heads);
    }
  }
  // Nothing may be left that starts late and outlasts the rest: from each section on there has to
  // be work to fill the machine for as long as that section's longest item.
  std::int64_t left = 0;
  for (std::size_t i = result.size(); i-- > 1;) {
    Section& section = result[i];
    if (left + section.cost >= problem.cta_slots * section.longest) {
      left += section.cost;
      continue;
    }
    result[i - 1].add(section);
    result.erase(result.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return result;
}

// Calls visit(index, unit, group) for every unit of a section, group by group.
template <class Visit>
void for_each_unit(const Section& section, const WorkList& work, Visit&& visit) {
  for (const UnitGroup& group : section.groups) {
    for (std::int32_t i = group.first_unit; i < group.end_unit; ++i) visit(i, work.units[i], group);
  }
}

OrderedUnit ordered(std::int32_t unit, const UnitGroup& group) {
  return {unit, static_cast<std::int16_t>(group.head_begin),
          static_cast<std::int16_t>(group.head_end)};
}

// Counting sort, stable. Costs share a bucket only beyond kMaxBuckets, and then differ by less than
// 1/2048 of the longest.
void append_longest_first(const Section& section, const WorkList& work,
                          std::vector<std::int32_t>& starts, std::vector<OrderedUnit>& order) {
  if (section.costs_are_equal()) {
    for_each_unit(section, work, [&](std::int32_t i, const WorkUnit&, const UnitGroup& group) {
      order.push_back(ordered(i, group));
    });
    return;
  }
  std::int32_t shift = 0;
  while ((section.longest >> shift) >= kMaxBuckets) ++shift;
  const std::int32_t top = section.longest >> shift;
  const auto bucket_of = [&](const WorkUnit& unit) { return top - (unit.cost >> shift); };

  starts.assign(top + 2, 0);
  for_each_unit(section, work, [&](std::int32_t, const WorkUnit& unit, const UnitGroup&) {
    ++starts[bucket_of(unit) + 1];
  });
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  const std::size_t base = order.size();
  order.resize(base + starts.back());
  for_each_unit(section, work, [&](std::int32_t i, const WorkUnit& unit, const UnitGroup& group) {
    order[base + starts[bucket_of(unit)]++] = ordered(i, group);
  });
}

// One segment's part of the order, as far as it has been merged.
struct SegmentOrder {
  std::vector<OrderedUnit> units;
  std::size_t next = 0;
  std::int64_t done = 0;  // cost of the units before `next`
  std::int64_t total = 0;

  bool any() const { return next < units.size(); }
};

std::int64_t cost_of(const OrderedUnit& ordered, const WorkUnit& unit) {
  return std::int64_t{ordered.heads()} * unit.cost;
}

// Both segments of a launch, side by side from the first item to the last: memory is busy with a
// decode batch while the tensor cores are with a prefill. The segment that is further behind in its
// own work comes next, but no item begins so late that it would end after all others.
class SideBySide {
 public:
  SideBySide(const WorkList& work, std::span<const OrderedUnit> order, std::int64_t cta_slots)
      : work_(work), mean_(static_cast<double>(work.cost) / static_cast<double>(cta_slots)) {
    for (const OrderedUnit& ordered : order) {
      SegmentOrder& segment = segments_[ordered.unit < work.segments[1].first_unit ? 0 : 1];
      segment.units.push_back(ordered);
      segment.total += cost_of(ordered, work.units[ordered.unit]);
    }
  }

  std::vector<OrderedUnit> merged() {
    std::vector<OrderedUnit> order;
    order.reserve(segments_[0].units.size() + segments_[1].units.size());
    while (segments_[0].any() || segments_[1].any()) {
      const bool first = start_of(segments_[0]) <= start_of(segments_[1]);
      SegmentOrder& segment = segments_[first ? 0 : 1];
      const OrderedUnit& ordered = segment.units[segment.next++];
      segment.done += cost_of(ordered, work_.units[ordered.unit]);
      order.push_back(ordered);
    }
    return order;
  }

 private:
  // When a segment's next unit should begin, as a share of the launch's time.
  double start_of(const SegmentOrder& segment) const {
    if (!segment.any()) return std::numeric_limits<double>::infinity();
    const WorkUnit& unit = work_.units[segment.units[segment.next].unit];
    const double in_turn = static_cast<double>(segment.done) / static_cast<double>(segment.total);
    return std::min(in_turn, 1.0 - unit.cost / mean_);
  }

  const WorkList& work_;
  double mean_;  // cost of one slot
  SegmentOrder segments_[kMaxSegments];
};

}  // namespace

std::vector<OrderedUnit> order_units(const WorkList& work, const OrderProblem& problem) {
  std::vector<OrderedUnit> order;
  order.reserve(work.units.size());
  std::vector<std::int32_t> starts;
  for (const Section& section : sections(work, problem)) {
    append_longest_first(section, work, starts, order);
  }
  if (work.segments.size() < 2) return order;
  return SideBySide(work, order, problem.cta_slots).merged();
}

}  // namespace preflash
