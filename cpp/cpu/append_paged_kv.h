// append_paged_kv_cache on the CPU.
#pragma once

#include "preflash/params.h"

namespace preflash::cpu {

void append_paged_kv(const AppendParams& params, int num_threads);

}  // namespace preflash::cpu
