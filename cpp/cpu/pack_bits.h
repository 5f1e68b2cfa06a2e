// packbits and segment_packbits on the CPU.
#pragma once

#include "preflash/params.h"

namespace preflash::cpu {

void pack_bits(const PackBitsParams& params, int num_threads);

}  // namespace preflash::cpu
