#pragma once

#include <cuda_runtime_api.h>

#include "preflash/mask_classes.h"

namespace preflash {

cudaError_t launch_mask_classes(const MaskClassParams& params, int num_sms, cudaStream_t stream);

}  // namespace preflash
