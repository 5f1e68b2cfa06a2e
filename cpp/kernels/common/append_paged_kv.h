// append_paged_kv_cache on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/params.h"

namespace preflash {

// num_tokens and page_size are positive.
cudaError_t launch_append_paged_kv(const AppendParams& params, cudaStream_t stream);

}  // namespace preflash
