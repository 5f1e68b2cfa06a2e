// Lengths that only the device knows, written into the requests of a plan.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/params.h"

namespace preflash {

// num_requests > 0.
cudaError_t launch_set_lengths(const RequestLengths& lengths, cudaStream_t stream);

}  // namespace preflash
