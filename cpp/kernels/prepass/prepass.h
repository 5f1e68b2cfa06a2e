// The pre-pass: copies of what a kernel would otherwise convert again for every query tile.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/params.h"

namespace preflash {

// to_dtype is f16 or bf16, an operand's own dtype that or one of 8 bits; every head_dim is a
// multiple of 8. Rows begin at multiples of 8 elements, and of 16 bytes where they have 16 bits.
cudaError_t launch_prepass(const PrepassParams& params, cudaStream_t stream);

}  // namespace preflash
