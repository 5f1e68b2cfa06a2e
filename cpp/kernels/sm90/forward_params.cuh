// The parameters of an fa3 kernel: those of a segment, which item-level code takes, are the shared
// ones and the tensor maps.
#pragma once

#include "kernels/common/rotary.cuh"
#include "kernels/common/row_map.cuh"
#include "kernels/sm90/tensor_map.h"

namespace preflash::sm90 {

struct HopperSegment : KernelSegment {
  BoxShape box;
  std::int32_t rows_per_tile;  // token-aligned, except where a group exceeds the tile
  float x_per_logit;           // 1 in units of x, which times scale_log2 is a base-2 exponent
  TensorMaps maps;
};

// Of kernels that transform their operands.
struct TransformSegment : HopperSegment {
  RotaryFrequencies rotary;  // all 0 without RoPE
};

template <class Traits>
using SegmentOf = cute::conditional_t<Traits::kTransforms, TransformSegment, HopperSegment>;

template <class Traits>
using ParamsOf = LaunchParams<SegmentOf<Traits>, Traits::kSegments>;

// Which segment something belongs to: known when the kernel is compiled, where there is one.
template <int kSegments>
struct SegmentIndex {
  int index = 0;
};
template <>
struct SegmentIndex<1> {
  static constexpr int index = 0;
};

__device__ __forceinline__ int query_head(const HopperSegment& params, const WorkItem& item,
                                          const PackedRow& packed) {
  return item.kv_head * params.group_size + packed.head_in_group;
}

}  // namespace preflash::sm90
