// Host side of one fa3 kernel: its registry entry and its launch.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/sm90/forward_kernel.cuh"

namespace preflash::sm90 {

template <class V>
inline constexpr int kSmemBytes = sizeof(SharedStorage<ForwardTraits<V>>);

template <class V>
inline constexpr TileRows kTileRows = traits_of(V::kVariant.family).tile_rows;

// Returns nullptr, or a message if the driver refuses.
template <class V>
const char* make_segment(const ForwardSegment& segment, HopperSegment& hopper) {
  using Traits = ForwardTraits<V>;
  KernelSegment kernel = KernelSegment::make(segment, V::kVariant.logits);
  hopper = {kernel,
            box_shape(segment, Traits::kTileM, Traits::kTileN),
            rows_per_tile(kTileRows<V>, Traits::kTileM, segment.group_size),
            kLog2E / kernel.logits.scale_log2,
            {}};
  return encode_tensor_maps(segment, hopper.box, hopper.maps);
}

template <class V>
LaunchError launch_forward(const ForwardParams& params, int num_ctas, const LaunchTarget& target) {
  using Traits = ForwardTraits<V>;
  static_assert(kSmemBytes<V> <= kMaxSharedBytes);
  HopperParams hopper{.segments = {},
                      .requests = params.requests,
                      .items = params.items,
                      .cta_begin = params.cta_begin};
  const char* refusal = make_segment<V>(params.segments[0], hopper.segments[0]);
  if (refusal != nullptr) return refusal;
  LaunchShape shape{num_ctas, Traits::kThreads, kSmemBytes<V>};
  return launch_kernel<&forward_kernel<V>>(hopper, shape, target.stream);
}

template <class V>
ForwardKernel forward_kernel_entry() {
  return {V::kId, V::kVariant, V::kTile, kSmemBytes<V>, &launch_forward<V>};
}

}  // namespace preflash::sm90
