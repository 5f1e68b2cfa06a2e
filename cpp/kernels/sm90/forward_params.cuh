// ForwardParams as the fa3 kernels take them, tensor maps included.
#pragma once

#include "kernels/common/row_map.cuh"
#include "kernels/sm90/tensor_map.h"

namespace preflash::sm90 {

struct HopperParams : KernelParams {
  BoxShape box;
  std::int32_t rows_per_tile;  // whole tokens, but for groups larger than a tile
  TensorMaps maps;
};

}  // namespace preflash::sm90
