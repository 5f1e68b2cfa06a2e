// Runs the work list of one forward launch on the CPU's threads.
#pragma once

#include "preflash/params.h"
#include "preflash/variant.h"

namespace preflash::cpu {

// Each segment names its kernel. Every item is computed by one thread in a fixed order: results
// depend neither on the number of threads nor on the run. Returns nullptr, or what went wrong.
LaunchError run_forward(const ForwardParams& params, int num_threads);

}  // namespace preflash::cpu
