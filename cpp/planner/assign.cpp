#include "planner/assign.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace preflash {
namespace {

// Hands out the CTA with the least load. Loads only grow and an item adds at most `longest`, so a
// ring of buckets as long as the longest item holds every CTA: constant time each.
class LeastLoaded {
 public:
  LeastLoaded(std::int32_t num_ctas, std::int32_t longest) : ctas_(num_ctas) {
    while ((longest >> shift_) >= kRing - 1) ++shift_;
    for (std::int32_t cta = num_ctas - 1; cta >= 0; --cta) push(cta, 0);
  }

  // Adds `cost` to the least loaded CTA and writes it to `out`, `count` times.
  void give(std::int32_t cost, std::int64_t count, std::int32_t* out) {
    // Locals, not members: a compiler must assume that each store to a list changes the members,
    // and would read them again for the next item.
    Cta* const ctas = ctas_.data();
    std::int32_t current = current_;
    for (std::int32_t* const end = out + count; out < end; ++out) {
      if (current < 0) current = take_least();
      const std::int32_t cta = current;
      current = ctas[cta].next;
      push(cta, ctas[cta].load + cost);
      *out = cta;
    }
    current_ = current;
  }

  std::int64_t makespan() const {
    std::int64_t most = 0;
    for (const Cta& cta : ctas_) most = std::max(most, cta.load);
    return most;
  }

 private:
  static constexpr std::int64_t kRing = 1024;

  struct Cta {
    std::int64_t load = 0;
    std::int32_t next = -1;  // in the list of its bucket
  };

  void push(std::int32_t cta, std::int64_t load) {
    std::int32_t& head = heads_[(load >> shift_) & (kRing - 1)];
    ctas_[cta] = {.load = load, .next = head};
    head = cta;
  }

  // The list of the CTAs with the least load.
  std::int32_t take_least() {
    while (heads_[now_ & (kRing - 1)] < 0) ++now_;
    return std::exchange(heads_[now_ & (kRing - 1)], -1);
  }

  std::int32_t shift_ = 0;
  std::int64_t now_ = 0;       // no CTA has less load, in steps of 2^shift_
  std::int32_t current_ = -1;  // rest of the list that take_least() returned last
  std::vector<Cta> ctas_;
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

// If all items cost the same, each CTA in turn is the one with the least work. On a tie, the CTA
// that got an item last is first, so that turns alternate in direction.
Assignment assign_in_turns(const WorkList& work, std::int32_t num_ctas) {
  const std::int64_t turns = work.num_items / num_ctas;
  const std::int64_t rest = work.num_items % num_ctas;
  const bool back = turns % 2 == 1;  // the turn that only `rest` CTAs take
  Assignment result;
  result.cta_begin.resize(num_ctas + 1);
  for (std::int64_t cta = 0; cta <= num_ctas; ++cta) {
    const std::int64_t more =
        back ? std::max(cta - (num_ctas - rest), std::int64_t{0}) : std::min(cta, rest);
    result.cta_begin[cta] = static_cast<std::int32_t>(cta * turns + more);
  }
  result.makespan = (turns + (rest > 0)) * work.longest;
  return result;
}

// Fills cta_begin once every item has its CTA.
void count_lists(std::int32_t num_ctas, Assignment& assignment) {
  std::vector<std::int32_t>& begin = assignment.cta_begin;
  begin.assign(num_ctas + 1, 0);
  for (const std::int32_t cta : assignment.cta_of_item) ++begin[cta + 1];
  std::partial_sum(begin.begin(), begin.end(), begin.begin());
}

}  // namespace

std::int64_t late_cost_of(const WorkList& work, std::int32_t num_ctas) {
  constexpr std::int64_t kPart = 10;     // late: 1 / kPart of the work
  constexpr std::int64_t kFewItems = 4;  // none late with fewer longest items per slot
  const bool few = work.cost < kFewItems * work.longest * num_ctas;
  return work.segments.size() < 2 || few ? 0 : work.cost / kPart;
}

Assignment assign(const WorkList& work, std::span<const OrderedUnit> order,
                  const AssignProblem& problem) {
  if (work.num_items == 0) {
    return {.cta_begin = std::vector<std::int32_t>(problem.num_ctas + 1), .cta_of_item = {}};
  }
  if (work.costs_are_equal() && problem.late_cost == 0) {
    return assign_in_turns(work, problem.num_ctas);
  }
  Assignment result;
  result.cta_of_item.resize(work.num_items);
  LeastLoaded ctas(problem.num_ctas, work.longest);
  LateLists late(problem, work.longest);
  std::int64_t early_cost = work.cost - problem.late_cost;
  std::int32_t num_ctas = problem.num_ctas;
  std::int32_t* next = result.cta_of_item.data();
  for_each_run(work, order, [&](std::span<const OrderedUnit> run) {
    const std::int32_t cost = work.units[run.front().unit].cost;
    const std::int64_t count = std::ssize(run) * run.front().heads();
    ctas.give(cost, count, next);
    for (std::int32_t* const end = next + count; next < end; ++next, early_cost -= cost) {
      if (early_cost > 0) continue;
      // A late item takes the slot that is free first, as far as costs tell.
      *next = problem.num_ctas + late.give(cost);
      num_ctas = *next + 1;
    }
  });
  result.makespan = ctas.makespan();
  count_lists(num_ctas, result);
  return result;
}

}  // namespace preflash
