#include "planner/order.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace preflash {
namespace {

constexpr std::int32_t kMaxBuckets = 4096;

// The heads [head_begin, head_end) of one request.
struct HeadGroup {
  std::int32_t request = 0;
  std::int32_t head_begin = 0;
  std::int32_t head_end = 0;
};

struct Section {
  std::vector<HeadGroup> groups;
  std::int64_t kv_bytes = 0;
  std::int64_t cost = 0;
  std::int32_t longest = 0;

  // Whether it could keep every slot busy for as long as its longest item.
  bool fills(std::int64_t cta_slots) const {
    return !groups.empty() && cost >= cta_slots * longest;
  }

  void add(HeadGroup group, const RequestWork& request) {
    const std::int64_t heads = group.head_end - group.head_begin;
    // 2^60 bytes exceed any L2: that pages may be shared, more often than int64 can count, is no
    // matter.
    kv_bytes = std::min(kv_bytes + heads * request.reused_kv_bytes, std::int64_t{1} << 60);
    cost += heads * request.cost;
    longest = std::max(longest, request.longest);
    if (!groups.empty() && groups.back().request == group.request &&
        groups.back().head_end == group.head_begin) {
      groups.back().head_end = group.head_end;
    } else {
      groups.push_back(group);
    }
  }
};

Section everything(const WorkList& work) {
  Section section;
  section.groups.reserve(work.requests.size());
  for (std::size_t r = 0; r < work.requests.size(); ++r) {
    const RequestWork& request = work.requests[r];
    if (request.num_units == 0) continue;
    section.add({static_cast<std::int32_t>(r), 0, request.num_kv_heads}, request);
  }
  return section;
}

// A section's K/V is read from memory while its longest items run. Half a MiB in the time of a KV
// tile, a sixth of an H100's bandwidth, leaves room for Q, O and the section that comes next.
constexpr std::int64_t kBytesPerKvTile = std::int64_t{1} << 19;

// How much K/V a section with such a longest item may hold, and in how many parts of its longest
// item's time it has to keep the machine busy before it closes.
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
  longest_first.reserve(whole.groups.size());
  for (const HeadGroup& group : whole.groups) longest_first.push_back(group.request);
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
      result.back().add({r, head, static_cast<std::int32_t>(head + heads)}, request);
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
    for (const HeadGroup& group : section.groups) {
      result[i - 1].add(group, work.requests[group.request]);
    }
    result.erase(result.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return result;
}

// Counting sort, stable. Costs share a bucket only beyond kMaxBuckets, and then differ by less than
// 1/2048 of the longest.
void append_longest_first(const Section& section, const WorkList& work,
                          std::vector<std::int32_t>& starts, std::vector<OrderedUnit>& order) {
  std::int32_t shift = 0;
  while ((section.longest >> shift) >= kMaxBuckets) ++shift;
  const std::int32_t top = section.longest >> shift;
  const auto bucket_of = [&](const WorkUnit& unit) { return top - (unit.cost >> shift); };
  const auto units_of = [&](const HeadGroup& group) {
    const RequestWork& request = work.requests[group.request];
    return std::span(work.units).subspan(request.first_unit, request.num_units);
  };

  starts.assign(top + 2, 0);
  for (const HeadGroup& group : section.groups) {
    for (const WorkUnit& unit : units_of(group)) ++starts[bucket_of(unit) + 1];
  }
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  const std::size_t base = order.size();
  order.resize(base + starts.back());
  for (const HeadGroup& group : section.groups) {
    for (const WorkUnit& unit : units_of(group)) {
      order[base + starts[bucket_of(unit)]++] = {
          static_cast<std::int32_t>(&unit - work.units.data()),
          static_cast<std::int16_t>(group.head_begin), static_cast<std::int16_t>(group.head_end)};
    }
  }
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
  return std::int64_t{ordered.head_end - ordered.head_begin} * unit.cost;
}

// Both segments of a launch, side by side from the first item to the last: memory is busy with a
// decode batch while the tensor cores are with a prefill. Each goes on where it is further behind
// in its own work, but no item begins so late that it would end after all others.
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

// Hands out the CTA with the least load. Loads only grow and an item adds at most `longest`, so a
// ring of buckets as long as the longest item holds every CTA: constant time each.
class LeastLoaded {
 public:
  LeastLoaded(std::int32_t num_ctas, std::int32_t longest) : loads_(num_ctas), next_(num_ctas) {
    while ((longest >> shift_) >= kRing - 1) ++shift_;
    for (std::int32_t cta = num_ctas - 1; cta >= 0; --cta) push(cta);
  }

  // Adds `cost` to the least loaded CTA and returns it.
  std::int32_t give(std::int32_t cost) {
    if (current_ < 0) {
      while (heads_[now_ & (kRing - 1)] < 0) ++now_;
      current_ = std::exchange(heads_[now_ & (kRing - 1)], -1);
    }
    const std::int32_t cta = current_;
    current_ = next_[cta];
    loads_[cta] += cost;
    push(cta);
    return cta;
  }

  std::int64_t makespan() const { return *std::max_element(loads_.begin(), loads_.end()); }

 private:
  static constexpr std::int64_t kRing = 1024;

  void push(std::int32_t cta) {
    std::int32_t& head = heads_[(loads_[cta] >> shift_) & (kRing - 1)];
    next_[cta] = head;
    head = cta;
  }

  std::int32_t shift_ = 0;
  std::int64_t now_ = 0;       // no CTA has less load, in steps of 2^shift_
  std::int32_t current_ = -1;  // the list taken out of bucket now_
  std::vector<std::int64_t> loads_;
  std::vector<std::int32_t> next_;
  std::vector<std::int32_t> heads_ = std::vector<std::int32_t>(kRing, -1);
};

// Cuts the late items into lists: each takes a part of what is left for every slot.
class LateLists {
 public:
  LateLists(const AssignProblem& problem, std::int32_t longest)
      : num_ctas_(problem.num_ctas), left_(problem.late_cost), least_(longest / kShortest) {}

  // Adds an item of this cost and returns its list, counted from 0.
  std::int32_t give(std::int32_t cost) {
    if (list_ < 0 || load_ + cost / 2 >= target_) {
      ++list_;
      load_ = 0;
      target_ = std::max(left_ * kPartOfNum / (num_ctas_ * kPartOfDen), least_);
    }
    load_ += cost;
    left_ -= cost;
    return list_;
  }

 private:
  // A list takes so much of what is left for a slot, and at least this part of the longest item.
  static constexpr std::int64_t kPartOfNum = 3, kPartOfDen = 4;
  static constexpr std::int64_t kShortest = 4;

  std::int64_t num_ctas_;
  std::int64_t left_;
  std::int64_t least_;
  std::int64_t target_ = 0;
  std::int64_t load_ = 0;
  std::int32_t list_ = -1;
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

std::int64_t late_cost_of(const WorkList& work, std::int32_t num_ctas) {
  constexpr std::int64_t kPart = 10;     // of the work
  constexpr std::int64_t kFewItems = 4;  // of the longest, for each slot
  const bool few = work.cost < kFewItems * work.longest * num_ctas;
  return work.segments.size() < 2 || few ? 0 : work.cost / kPart;
}

Assignment assign(const WorkList& work, std::span<const OrderedUnit> order,
                  const AssignProblem& problem) {
  Assignment result;
  result.cta_begin.assign(problem.num_ctas + 1, 0);
  result.position.resize(work.num_items);
  if (work.num_items == 0) return result;

  LeastLoaded ctas(problem.num_ctas, work.longest);
  LateLists late(problem, work.longest);
  std::int64_t early_cost = work.cost - problem.late_cost;
  std::int32_t* cta_of_item = result.position.data();
  for_each_item(work, order, [&](const WorkUnit& unit, int) {
    // A late item takes the slot that is free first, as far as costs tell.
    std::int32_t cta = ctas.give(unit.cost);
    if (early_cost <= 0) {
      cta = problem.num_ctas + late.give(unit.cost);
      result.cta_begin.resize(cta + 2);
    }
    early_cost -= unit.cost;
    ++result.cta_begin[cta + 1];
    *cta_of_item++ = cta;
  });
  result.makespan = ctas.makespan();

  std::partial_sum(result.cta_begin.begin(), result.cta_begin.end(), result.cta_begin.begin());
  std::vector<std::int32_t> next(result.cta_begin.begin(), result.cta_begin.end() - 1);
  for (std::int32_t& place : result.position) place = next[place]++;
  return result;
}

}  // namespace preflash
