// Host side of one fa2 kernel: its registry entry and its launch.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/sm80/forward_kernel.cuh"

namespace preflash::sm80 {

template <class V>
inline constexpr int kSmemBytes = sizeof(SharedStorage<ForwardTraits<V>>);

// Kept from launch to launch, since a power for each pair of dimensions takes as long as a launch.
inline const RotaryFrequencies& rotary_frequencies(const RopeOptions& rope, int head_dim) {
  struct Kept {
    RopeOptions rope;
    int head_dim = 0;
    RotaryFrequencies frequencies;
  };
  thread_local Kept kept;
  if (kept.head_dim != head_dim || !(kept.rope == rope)) {
    kept = {rope, head_dim, RotaryFrequencies::make(rope, head_dim)};
  }
  return kept.frequencies;
}

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
