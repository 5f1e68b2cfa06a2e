// In which order items run.
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

}  // namespace preflash
