// Weighted sums of attention states on the CPU: the split-KV combine and merge_states.
#pragma once

#include "preflash/params.h"

namespace preflash::cpu {

void combine(const CombineParams& params, int num_threads);
void merge_states(const MergeStatesParams& params, int num_threads);

}  // namespace preflash::cpu
