// Limits on the work of a batch: the float workspace, the room of a CUDA graph and int32; and the
// errors for work that exceeds them.
#pragma once

#include <cstdint>
#include <span>

#include "planner/split.h"
#include "planner/work.h"
#include "preflash/problem.h"

namespace preflash {

// Throws where a CUDA graph would reserve more work items than there can be.
SplitLimits split_limits(const Problem& problem, std::span<const SegmentPlan> plans,
                         std::int64_t cta_slots);

// items: of all segments.
void check_item_count(const SegmentProblem& problem, std::int64_t items_per_head,
                      std::int64_t items);

// The launches of one plan whose partial results exceed the float workspace.
inline constexpr std::int64_t kMostRounds = 64;

// Throws if kMostRounds launches have no room for so many rows of partial results, of which a query
// tile has tile_rows at most.
void check_rounds(const SegmentProblem& problem, const SplitLimits& limits, std::int64_t rows,
                  std::int64_t tile_rows);

// A fixed split is a promise about results, so the planner keeps it or refuses the plan.
void check_fixed_splits(const Problem& problem, const SplitLimits& limits,
                        const SplitEstimate& needed);

}  // namespace preflash
