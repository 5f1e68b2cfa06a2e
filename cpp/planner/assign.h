// Assignment of work items to CTAs that each run a list of items.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "planner/order.h"
#include "planner/work.h"

namespace preflash {

// Item list of every CTA. A CTA's items are consecutive in the work list, in running order.
struct Assignment {
  std::vector<std::int32_t> cta_begin;  // [number of CTAs + 1]
  // [num_items], in running order. Empty: CTAs take items in turns, back and forth.
  std::vector<std::int32_t> cta_of_item;
  std::int64_t makespan = 0;  // cost of the busiest CTA

  bool present() const { return !cta_begin.empty(); }
  std::int32_t num_ctas() const { return static_cast<std::int32_t>(cta_begin.size()) - 1; }
};

// CTAs in turns: from the first to the last, back to the first, and so on.
class BackAndForth {
 public:
  explicit BackAndForth(std::int32_t num_ctas) : num_ctas_(num_ctas), left_(num_ctas) {}

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

// Inputs of assign(), for a persistent schedule.
struct AssignProblem {
  std::int32_t num_ctas = 1;  // that begin at once, one for each slot
  // The last items, of so much cost in all, are lists of further CTAs. The hardware begins those in
  // order as slots become free, so that errors of the cost model even out; but a CTA takes longer
  // to begin than an item.
  std::int64_t late_cost = 0;
};

// Returns the cost of the items that begin late. With prefill and decode in one launch, the speed
// of either depends on what the other SMs run at the time, so that lists that all begin at once end
// an item's time apart. 0 for one segment, and in a launch of few items.
std::int64_t late_cost_of(const WorkList& work, std::int32_t num_ctas);

// Takes items in running order and gives each to the CTA with the least work so far; the late ones
// to lists that become shorter and shorter.
Assignment assign(const WorkList& work, std::span<const OrderedUnit> order,
                  const AssignProblem& problem);

}  // namespace preflash
