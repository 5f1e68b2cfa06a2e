// Host side of one fa2 kernel: its registry entry and its launch.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/sm80/forward_kernel.cuh"

namespace preflash::sm80 {

template <class V>
inline constexpr int kSmemBytes = sizeof(SharedStorage<ForwardTraits<V>>);

template <class V>
typename ForwardTraits<V>::Segment make_segment(const ForwardSegment& segment) {
  if constexpr (!ForwardTraits<V>::kTransforms) {
    return KernelSegment::make(segment, V::kVariant.logits);
  } else {
    Logits logits = segment.soft_cap > 0.0f ? Logits::kSoftCap : Logits::kPlain;
    TransformSegment made{KernelSegment::make(segment, logits), {}};
    if (segment.position == Position::kRope) {
      made.rotary = rotary_frequencies(segment.rope, segment.head_dim_qk);
    }
    return made;
  }
}

template <class V>
LaunchError launch_forward(const ForwardParams& params, int num_ctas, const LaunchTarget& target) {
  LaunchShape shape{num_ctas, ForwardTraits<V>::kThreads, kSmemBytes<V>};
  typename ForwardTraits<V>::Params kernel{.segments = {make_segment<V>(params.segments[0])},
                                           .requests = params.requests,
                                           .items = params.items,
                                           .cta_begin = params.cta_begin};
  return launch_kernel<&forward_kernel<V>>(kernel, shape, target.stream);
}

template <class V>
ForwardKernel forward_kernel_entry() {
  return {V::kId, V::kVariant, V::kTile, kSmemBytes<V>, &launch_forward<V>};
}

}  // namespace preflash::sm80
