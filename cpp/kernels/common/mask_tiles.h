// Finds the full, partial and empty tiles of custom masks in the masks' bits.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/mask_tiles.h"

namespace preflash {

// num_requests > 0; tile_keys is a multiple of 16 up to 512. The lengths stay on the device.
cudaError_t launch_mask_tiles(const MaskTilesParams& params, int num_sms, cudaStream_t stream);

}  // namespace preflash
