// Classes of the tiles of custom masks, made out of the masks' bits.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/mask_classes.h"

namespace preflash {

// num_requests > 0; tile_keys is a multiple of 16 up to 512. The lengths stay on the device.
cudaError_t launch_mask_classes(const MaskClassParams& params, int num_sms, cudaStream_t stream);

}  // namespace preflash
