// Host side of one fa2 kernel: its registry entry and its launch.
#pragma once

#include "kernels/common/item_timer.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/sm80/forward_kernel.cuh"

namespace preflash::sm80 {

template <class V>
constexpr int smem_bytes() {
  std::size_t bytes = sizeof(SharedStorage<ForwardTraits<V>>);
  if constexpr (ForwardTraits<V>::kSegments == 2) {
    bytes = std::max(bytes, sizeof(SharedStorage<ForwardTraits<SecondSegment<V>>>));
  }
  return static_cast<int>(bytes);
}
template <class V>
inline constexpr int kSmemBytes = smem_bytes<V>();

template <class V>
typename ForwardTraits<V>::Segment make_segment(const ForwardSegment& segment) {
  typename ForwardTraits<V>::Segment made{};
  static_cast<KernelSegment&>(made) = KernelSegment::make(segment);
  if constexpr (ForwardTraits<V>::kConverts) {
    if (segment.position == Position::kRope) {
      made.rotary = rotary_frequencies(segment.rope, segment.head_dim_qk);
    }
  }
  return made;
}

template <class V>
LaunchError launch_forward(const ForwardParams& params, int num_ctas, const LaunchTarget& target) {
  LaunchShape shape{num_ctas, ForwardTraits<V>::kThreads, kSmemBytes<V>};
  auto kernel = ForwardTraits<V>::Params::make(params);
  for (int s = 0; s < ForwardTraits<V>::kSegments; ++s) {
    kernel.segments[s] = make_segment<V>(params.segments[s]);
  }
  return launch_kernel<&forward_kernel<V>>(kernel, shape, target.stream);
}

template <class V>
ForwardKernel forward_kernel_entry() {
  ForwardKernel entry{V::kId, V::kVariant, V::kTile, kSmemBytes<V>, &launch_forward<V>};
  entry.tracing = kTracing;
  if constexpr (ForwardTraits<V>::kSegments == 2) entry.second_tile = V::kSecondTile;
  return entry;
}

}  // namespace preflash::sm80
