// The copies that the pre-pass makes before the kernel, on the CPU.
#pragma once

#include "preflash/params.h"

namespace preflash::cpu {

void prepass(const PrepassParams& params, int num_threads);

}  // namespace preflash::cpu
