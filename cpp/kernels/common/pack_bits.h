// packbits and segment_packbits on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "preflash/params.h"

namespace preflash {

// num_segments > 0. Writes every byte of [out_begin[0], out_begin[num_segments]); those past a
// segment's last bit are zero. The lengths stay on the device: the host never waits for them.
cudaError_t launch_pack_bits(const PackBitsParams& params, int num_sms, cudaStream_t stream);

}  // namespace preflash
