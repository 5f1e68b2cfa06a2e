// Decides if two batches run as one launch where a kernel takes both.
#pragma once

#include "core/plan.h"
#include "preflash/family_traits.h"

namespace preflash {

// True where a prefill and then a decode batch are expected to take less time than both at once. A
// kernel of two segments runs a prefill slower than the prefill's own, and hides at most the time
// of the shorter side (docs/dev/experiments/prefill-beside-decode.md).
bool prefer_two_launches(const FamilyTraits& family, const PlanRequest& prefill,
                         const PlanRequest& decode);

}  // namespace preflash
