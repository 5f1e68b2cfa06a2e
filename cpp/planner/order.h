// In which order items run, and on which CTA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/work.h"

namespace preflash {

// Unit `unit` for the KV heads [head_begin, head_end).
struct OrderedUnit {
  std::int32_t unit = 0;
  std::int16_t head_begin = 0;
  std::int16_t head_end = 0;

  std::int32_t heads() const { return head_end - head_begin; }
};

struct OrderProblem {
  std::int64_t cta_slots = 1;
  std::int64_t l2_bytes = 0;  // 0: unknown, do not group by it
};

// Longest first, the units of all segments in one list. When the K/V that several query tiles share
// exceeds the L2, or would have to come from memory faster than it can, (request, head) pairs are
// grouped into sections of less K/V, and sections run one after the other, each longest first. A
// section is closed only once its work could keep every slot busy for as long as its longest item,
// or a quarter of that where items are short; and whatever begins there is work behind it to fill
// the machine while it runs: so grouping costs little balance.
// The units of two segments alternate, each segment's in this order, so that both run out together.
std::vector<OrderedUnit> order_units(const WorkList& work, const OrderProblem& problem);

// Calls emit(run) for every run of the order: neighbouring units of one request, one cost and the
// same heads, which are taken head by head, so that items which read the same K/V start together.
template <class Emit>
void for_each_run(const WorkList& work, std::span<const OrderedUnit> order, Emit&& emit) {
  for (std::size_t begin = 0; begin < order.size();) {
    const WorkUnit& first = work.units[order[begin].unit];
    std::size_t end = begin + 1;
    for (; end < order.size(); ++end) {
      const WorkUnit& unit = work.units[order[end].unit];
      if (unit.request != first.request || unit.cost != first.cost ||
          order[end].head_begin != order[begin].head_begin) {
        break;
      }
    }
    emit(order.subspan(begin, end - begin));
    begin = end;
  }
}

// Calls emit(unit, head) for every item in running order.
template <class Emit>
void for_each_item(const WorkList& work, std::span<const OrderedUnit> order, Emit&& emit) {
  for_each_run(work, order, [&](std::span<const OrderedUnit> run) {
    const auto [first, head_begin, head_end] = run.front();
    if (run.size() == 1) {  // most runs of a decode batch: no look at the unit for every head
      const WorkUnit& unit = work.units[first];
      for (int head = head_begin; head < head_end; ++head) emit(unit, head);
      return;
    }
    for (int head = head_begin; head < head_end; ++head) {
      for (const OrderedUnit& ordered : run) emit(work.units[ordered.unit], head);
    }
  });
}

// Which CTA runs what. A CTA's items are one behind the other in the work list, in running order.
struct Assignment {
  std::vector<std::int32_t> cta_begin;  // [number of CTAs + 1]
  // [num_items], in running order. Empty: CTAs take items in turns, forth and back.
  std::vector<std::int32_t> cta_of_item;
  std::int64_t makespan = 0;  // cost of the busiest CTA

  bool present() const { return !cta_begin.empty(); }
  std::int32_t num_ctas() const { return static_cast<std::int32_t>(cta_begin.size()) - 1; }
};

// CTAs in turns: from the first to the last, back to the first, and so on.
class ForthAndBack {
 public:
  explicit ForthAndBack(std::int32_t num_ctas) : num_ctas_(num_ctas), left_(num_ctas) {}

  std::int32_t next() {
    const std::int32_t cta = cta_;
    if (--left_ > 0) {
      cta_ += step_;
    } else {
      left_ = num_ctas_;
      step_ = -step_;
    }
    return cta;
  }

 private:
  std::int32_t num_ctas_;
  std::int32_t left_;  // of this direction
  std::int32_t cta_ = 0;
  std::int32_t step_ = 1;
};

// How the items of a persistent schedule reach CTAs.
struct AssignProblem {
  std::int32_t num_ctas = 1;  // that begin at once, one for each slot
  // The last items, of so much cost in all, are lists of further CTAs. The hardware begins those in
  // order as slots become free, so that errors of the cost model even out; but a CTA takes longer
  // to begin than an item.
  std::int64_t late_cost = 0;
};

// The cost of what begins late. Prefill beside decode: how fast either kind is depends on what the
// other SMs do at the time, so that lists which all begin at once end by an item's time apart. In
// a launch of few items there is no room for it.
std::int64_t late_cost_of(const WorkList& work, std::int32_t num_ctas);

// Takes items in running order and gives each to the CTA with the least work so far; the late ones
// to lists that become shorter and shorter.
Assignment assign(const WorkList& work, std::span<const OrderedUnit> order,
                  const AssignProblem& problem);

}  // namespace preflash
