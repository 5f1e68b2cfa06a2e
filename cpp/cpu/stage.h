// The copies that the pre-pass makes before the kernel, on the CPU.
#pragma once

#include "preflash/params.h"

namespace preflash::cpu {

void stage(const StageParams& params, int num_threads);

}  // namespace preflash::cpu
