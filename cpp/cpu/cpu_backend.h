// The CPU backend as the rest of the module sees it: its kernels, and its side of the
// DeviceServices table, so that callers have one code path for both devices.
#pragma once

#include "preflash/device_services.h"
#include "preflash/variant.h"

namespace preflash {

// Generated from the variant matrix. Never null.
const KernelLibrary* cpu_kernel_library();

// Never null. Calls return when their work is done, so streams play no role; device is -1. Throws
// like cpu_isa_name().
const DeviceServices* cpu_device_services();

// The instruction set in use: "generic", "avx2" or "avx512". The environment variable
// PREFLASH_CPU_ISA, read once, asks for a narrower one than the machine has; throws
// std::invalid_argument where it holds another word.
const char* cpu_isa_name();

}  // namespace preflash
