// Copies that a staged plan makes before its kernel, on the CPU.
#pragma once

#include "preflash/params.h"

namespace preflash::cpu {

void stage(const StageParams& params, int num_threads);

}  // namespace preflash::cpu
