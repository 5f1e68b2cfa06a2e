// The parameters of an fa3 kernel, which forward_launch.cuh fills.
#pragma once

#include "cuda/tma/tensor_map.h"
#include "kernels/common/rotary.cuh"
#include "kernels/common/row_map.cuh"
#include "kernels/sm90/soft_cap.cuh"

namespace preflash::sm90 {

struct HopperSegment : KernelSegment {
  std::int32_t rows_per_tile;  // token-aligned, except where a group exceeds the tile
  // Aligned query tiles (QueryGrid): tiles of keys that a split chunk has. 0: they are not aligned.
  std::int32_t aligned_chunk_tiles;

  // Loads.
  TensorMaps maps;
  BoxShape box;
  const std::int64_t* mask_tiles_begin;

  // Scores.
  float x_per_logit;  // 1 in units of x, which times scale_log2 is a base-2 exponent
  float max_sum;      // SpeculativeSoftmax::max_sum()
  SoftCap cap;        // of kernels with Traits::kCaps
};

struct ConversionSegment : HopperSegment {
  RotaryFrequencies rotary;  // all 0 without RoPE
};

template <class Traits>
using SegmentOf = cute::conditional_t<Traits::kConverts, ConversionSegment, HopperSegment>;

template <class Traits>
CUTE_DEVICE QueryGrid query_grid(const HopperSegment& params) {
  return {params.rows_per_tile, params.group_size,
          Traits::kAlignsQueryTiles && params.aligned_chunk_tiles > 0};
}

template <class Traits>
using ParamsOf = LaunchParams<SegmentOf<Traits>, Traits::kSegments>;

// Conversions that a launch's run-time options select: K and V are dequantised; K and V are
// dequantised and K is not rotated; K and V arrive as raw tiles or slices.
template <class Traits>
CUTE_HOST_DEVICE bool dequantizes(const HopperSegment& params) {
  return Traits::kWidens && size_of(params.kv_dtype) == 1;
}
template <class Traits>
CUTE_HOST_DEVICE bool only_dequantizes(const HopperSegment& params) {
  return dequantizes<Traits>(params) && params.position != Position::kRope;
}
template <class Traits>
CUTE_HOST_DEVICE bool loads_raw(const HopperSegment& params) {
  return Traits::kConverts && (!Traits::kSliced || only_dequantizes<Traits>(params));
}

// Segment of a work item, in a launch of kSegments.
template <int kSegments>
struct SegmentOfItem {
  int segment = 0;
};
template <>
struct SegmentOfItem<1> {
  static constexpr int segment = 0;
};

// An item's slot of SharedStorage::items. idle: a warpgroup has no rows of the item and computes
// nothing, in kernels where it may.
template <bool kMayIdle>
struct SlotOfItem {
  int slot = 0;
  bool idle = false;
};
template <>
struct SlotOfItem<false> {
  int slot = 0;
  static constexpr bool idle = false;
};

CUTE_DEVICE int query_head(const HopperSegment& params, const WorkItem& item,
                           const PackedRow& packed) {
  return item.kv_head * params.group_size + packed.head_in_group;
}

}  // namespace preflash::sm90
