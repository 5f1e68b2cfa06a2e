// Split-KV: the partial rows of each split tile become final rows of o and lse.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/params.h"

namespace preflash {

// params.num_merges > 0; o_dtype is f16, bf16, f32 or e4m3; head_dim_vo is a multiple of 8.
cudaError_t launch_combine(const CombineParams& params, int num_sms, cudaStream_t stream);

}  // namespace preflash
