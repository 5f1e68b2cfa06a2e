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

// A work item with its request and its segment. Rows: of the item's tile of rows.
struct ItemView {
  const HopperSegment& params;
  const WorkItem& item;
  const RequestInfo& request;
  int num_rows;

  CUTE_DEVICE static ItemView of(const HopperSegment& params, const auto& state) {
    return {params, state.item, state.request, state.num_rows};
  }
  CUTE_DEVICE PackedRow packed(int row) const { return unpack_row(params, item.row_begin + row); }
  CUTE_DEVICE int query_head(const PackedRow& packed) const {
    return item.kv_head * params.group_size + packed.head_in_group;
  }
  CUTE_DEVICE MaskBounds bounds() const { return bounds_of(params, request); }
};

}  // namespace preflash::sm90
