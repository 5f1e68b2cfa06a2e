// Host side of one fa3 kernel: its registry entry and its launch.
#pragma once

#include "kernels/common/item_timer.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/sm90/decode_kernel.cuh"
#include "kernels/sm90/forward_kernel.cuh"

namespace preflash::sm90 {

template <class V>
inline constexpr int kSmemBytes = sizeof(SharedStorage<ForwardTraits<V>>);

template <class V>
inline constexpr TileRows kTileRows = traits_of(V::kVariant.family).tile_rows;

template <class V>
HopperSegment make_segment(const ForwardSegment& segment, const BoxShape& box) {
  KernelSegment kernel = KernelSegment::make(segment);
  return {kernel,
          box,
          rows_per_tile(kTileRows<V>, ForwardTraits<V>::kTileM, segment.group_size),
          kLog2E / kernel.logits.scale_log2,
          SpeculativeSoftmax::max_sum(segment.lse.form, V::kVariant.q_dtype),
          {}};
}

// Operands that arrive by TMA, or are gathered. Returns nullptr, or why that cannot be.
// NOTE: a launch gathers the keys of all segments or of none: the roles of the producer warps and
// the arrivals at its barriers are the same for every item. A gathered segment may have any pages.
template <class V>
const char* make_direct(const ForwardParams& params, ParamsOf<ForwardTraits<V>>& hopper) {
  using Traits = ForwardTraits<V>;
  BoxShape boxes[Traits::kSegments];
  bool gather = false;
  for (int s = 0; s < Traits::kSegments; ++s) {
    boxes[s] = box_shape(params.segments[s], Traits::kTileM, Traits::kTileN);
    gather |= boxes[s].kv_rows == 0;
  }
  for (int s = 0; s < Traits::kSegments; ++s) {
    const ForwardSegment& segment = params.segments[s];
    if (gather) boxes[s].kv_rows = 0;
    static_cast<HopperSegment&>(hopper.segments[s]) = make_segment<V>(segment, boxes[s]);
    const char* refusal = encode_tensor_maps(segment, boxes[s], hopper.segments[s].maps);
    if (refusal != nullptr) return refusal;
  }
  return nullptr;
}

template <class V>
TransformSegment make_transformed(const ForwardSegment& segment) {
  TransformSegment transform{make_segment<V>(segment, BoxShape{}), {}};
  if (segment.position == Position::kRope) {
    transform.rotary = rotary_frequencies(segment.rope, segment.head_dim_qk);
  }
  return transform;
}

template <class V>
LaunchError launch_forward(const ForwardParams& params, int num_ctas, const LaunchTarget& target) {
  using Traits = ForwardTraits<V>;
  static_assert(kSmemBytes<V> <= kMaxSharedBytes);
  ParamsOf<Traits> hopper{.segments = {},
                          .requests = params.requests,
                          .items = params.items,
                          .cta_begin = params.cta_begin,
                          .num_lists = num_ctas};
  if constexpr (Traits::kConverts) {
    static_cast<TransformSegment&>(hopper.segments[0]) = make_transformed<V>(params.segments[0]);
  } else {
    const char* refusal = make_direct<V>(params, hopper);
    if (refusal != nullptr) return refusal;
  }
  if constexpr (Traits::kCaps) {
    const char* refusal = hopper.segments[0].set_cap();
    if (refusal != nullptr) return refusal;
  }
  pass_records(params, hopper);
  // Lists of items that share their columns out come in whole groups of CTAs.
  const int parts = ceil_div(params.segments[0].head_dim_vo, Traits::kPartVo);
  const int ctas = ceil_div(num_ctas, parts) * parts;
  LaunchShape shape{ctas, Traits::kThreads, kSmemBytes<V>};
  return launch_kernel<&forward_kernel<V>>(hopper, shape, target.stream);
}

template <class V>
  requires(V::kVariant.tile_class == TileClass::kDecode)
LaunchError launch_decode(const ForwardParams& params, int num_ctas, const LaunchTarget& target) {
  using Traits = DecodeTraits<V>;
  constexpr int kBytes = sizeof(DecodeStorage<Traits>);
  static_assert(kBytes <= kMaxSharedBytes);
  const ForwardSegment& segment = params.segments[0];
  if (size_of(segment.kv_dtype) != Traits::kStoredBytes || segment.position == Position::kRope) {
    return "the short tiles of fa3 take keys of the size that they were compiled for, and rotate "
           "none";
  }
  KernelSegment kernel = KernelSegment::make(segment);
  LaunchParams<HopperSegment> decode{
      .segments = {{kernel,
                    BoxShape{},
                    rows_per_tile(kTileRows<V>, Traits::kTileM, segment.group_size),
                    kLog2E / kernel.logits.scale_log2,
                    SpeculativeSoftmax::max_sum(segment.lse.form, V::kVariant.q_dtype),
                    {}}},
      .requests = params.requests,
      .items = params.items,
      .cta_begin = params.cta_begin,
      .num_lists = num_ctas};
  pass_records(params, decode);
  LaunchShape shape{num_ctas, Traits::kThreads, kBytes};
  return launch_kernel<&decode_kernel<V>>(decode, shape, target.stream);
}

template <class V>
  requires(V::kVariant.tile_class == TileClass::kDecode)
ForwardKernel forward_kernel_entry() {
  return {.id = V::kId,
          .variant = V::kVariant,
          .tile = V::kTile,
          .smem_bytes = sizeof(DecodeStorage<DecodeTraits<V>>),
          .launch = &launch_decode<V>,
          .tracing = kTracing};
}

template <class V>
ForwardKernel forward_kernel_entry() {
  ForwardKernel entry{.id = V::kId,
                      .variant = V::kVariant,
                      .tile = V::kTile,
                      .smem_bytes = kSmemBytes<V>,
                      .launch = &launch_forward<V>,
                      .ctas_per_item = ForwardTraits<V>::kColumnParts,
                      .tracing = kTracing};
  if constexpr (ForwardTraits<V>::kHasMaskBits) entry.tile_classes = TileClasses::kUsed;
  if constexpr (ForwardTraits<V>::kSegments == 2) entry.second_tile = V::kSecondTile;
  return entry;
}

}  // namespace preflash::sm90
