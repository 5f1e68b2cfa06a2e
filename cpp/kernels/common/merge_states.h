// The cascade functions merge_state, merge_state_in_place and merge_states on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/params.h"

namespace preflash {

// num_tokens and num_heads are positive; dtype is f16, bf16 or f32. v_out and s_out may be v[0] and
// s[0] in the form of two inputs.
cudaError_t launch_merge_states(const MergeStatesParams& params, cudaStream_t stream);

}  // namespace preflash
