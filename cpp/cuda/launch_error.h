// Device-side errors as text. A LaunchError points into a buffer of the calling thread and is valid
// until that thread makes its next failing call: whoever receives it copies it at once.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "preflash/variant.h"

namespace preflash {

// nullptr for cudaSuccess; otherwise "<what>: <name> (<description>)". Clears the runtime's
// last-error state, so that a refused call leaves nothing for the next one to trip over.
LaunchError runtime_error(cudaError_t status, const char* what);

// The same for the driver API, which has no descriptions while it is not loaded.
LaunchError driver_error(CUresult status, const char* what);

// A sentence of our own, formatted as printf does.
[[gnu::format(printf, 1, 2)]] LaunchError usage_error(const char* format, ...);

}  // namespace preflash
