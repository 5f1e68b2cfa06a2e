// Host side of one fa3 kernel: its registry entry and its launch.
#pragma once

#include "kernels/common/item_timer.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/sm90/decode_kernel.cuh"
#include "kernels/sm90/forward_kernel.cuh"

namespace preflash::sm90 {

template <class V>
inline constexpr int kSmemBytes = sizeof(SharedStorage<ForwardTraits<V>>);

// Fills what a kernel reads of a segment but for maps and boxes. Returns nullptr, or why it cannot.
template <class Traits, class Segment>
const char* make_segment(const ForwardSegment& from, Segment& to) {
  constexpr Variant kVariant = Traits::kVariant;
  static_cast<KernelSegment&>(to) = KernelSegment::make(from);
  to.rows_per_tile =
      rows_per_tile(traits_of(kVariant.family).tile_rows, Traits::kTileM, from.group_size);
  if (Traits::kAlignsQueryTiles && from.split.is_invariant()) {
    constexpr int kMostKeys = 1 << 30;
    const int chunk = from.split.is_one_pass() ? kMostKeys : from.split.fixed_split_size;
    to.aligned_chunk_tiles = ceil_div(std::min(chunk, kMostKeys), Traits::kItemTileN);
  }
  to.mask_tiles_begin = from.mask_tiles_begin;
  to.x_per_logit = kLog2E / to.logits.scale_log2;
  to.max_sum = SpeculativeSoftmax::max_sum(from.lse.form, kVariant.q_dtype);
  if constexpr (requires { to.rotary; }) {
    if (from.position == Position::kRope) {
      to.rotary = rotary_frequencies(from.rope, from.head_dim_qk);
    }
  }
  if constexpr (Traits::kCaps) {
    return to.cap.set(from, kVariant.q_dtype, to.logits.scale_log2);
  }
  return nullptr;
}

// Fills maps and boxes. Returns nullptr, or why it cannot. Operands arrive by TMA, or are gathered:
// those of all segments of a launch, or none, because roles and arrivals at barriers are the same
// for every item.
template <class Traits>
const char* make_maps(const ForwardParams& params, ParamsOf<Traits>& hopper) {
  bool gather = false;
  for (int s = 0; s < Traits::kSegments; ++s) {
    HopperSegment& segment = hopper.segments[s];
    segment.box = box_shape(params.segments[s], Traits::kTileM, Traits::kTileN);
    gather |= segment.box.kv_rows == 0;
    // Rotated operands are gathered, and so are stored rows that TMA refuses.
    if constexpr (Traits::kConverts) gather |= !only_dequantizes<Traits>(segment);
  }
  for (int s = 0; s < Traits::kSegments; ++s) {
    HopperSegment& segment = hopper.segments[s];
    const char* refusal = encode_q_map(params.segments[s], segment.box, segment.maps);
    if (refusal != nullptr) return refusal;
    if (!gather) refusal = encode_kv_maps(params.segments[s], segment.box, segment.maps);
    if (refusal != nullptr && !Traits::kConverts) return refusal;
    if (gather || refusal != nullptr) segment.box.kv_rows = segment.box.tail_rows = 0;
  }
  return nullptr;
}

// The variant without an LSE: neither the caller nor a chunk of a split request asks for one.
template <class V>
struct WithoutLse : V {
  static constexpr bool kWithoutLse = true;
};
// The variant for queries of 16 bits, if it has one.
template <class V>
struct QuantizingQ : V {
  static constexpr bool kQuantizesQ = true;
};
template <class Traits>
inline constexpr bool kMayQuantizeQ = Traits::kTransposesV && Traits::kHeadQk == 128;

template <class V>
LaunchError launch_forward(const ForwardParams& params, int num_ctas, const LaunchTarget& target) {
  using Traits = ForwardTraits<V>;
  static_assert(kSmemBytes<V> <= kMaxSharedBytes);
  if constexpr (kMayQuantizeQ<Traits> && !Traits::kQuantizesQ) {
    if (size_of(params.segments[0].q_dtype) == 2) {
      return launch_forward<QuantizingQ<V>>(params, num_ctas, target);
    }
  }
  auto hopper = ParamsOf<Traits>::make(params);
  const char* refusal = nullptr;
  for (int s = 0; s < Traits::kSegments && refusal == nullptr; ++s) {
    refusal = make_segment<Traits>(params.segments[s], hopper.segments[s]);
  }
  if (refusal == nullptr) refusal = make_maps<Traits>(params, hopper);
  if (refusal != nullptr) return refusal;
  LaunchShape shape{num_ctas * Traits::kClusterSize, Traits::kThreads, kSmemBytes<V>,
                    Traits::kClusterSize};
  if constexpr (Traits::kTransposesV) {
    const ForwardSegment& segment = params.segments[0];
    if (segment.lse.data == nullptr && segment.partial_lse == nullptr) {
      return launch_kernel<&forward_kernel<WithoutLse<V>>>(hopper, shape, target.stream);
    }
  }
  return launch_kernel<&forward_kernel<V>>(hopper, shape, target.stream);
}

template <class V>
LaunchError launch_decode(const ForwardParams& params, int num_ctas, const LaunchTarget& target) {
  using Traits = DecodeTraits<V>;
  constexpr int kBytes = sizeof(DecodeStorage<Traits>);
  static_assert(kBytes <= kMaxSharedBytes);
  const ForwardSegment& segment = params.segments[0];
  if (size_of(segment.kv_dtype) != Traits::kStoredBytes || segment.position == Position::kRope) {
    return "short tiles of fa3 take keys of the size they are compiled for, and rotate none";
  }
  auto decode = LaunchParams<HopperSegment>::make(params);
  if (const char* refusal = make_segment<Traits>(segment, decode.segments[0])) return refusal;
  LaunchShape shape{num_ctas, Traits::kThreads, kBytes};
  return launch_kernel<&decode_kernel<V>>(decode, shape, target.stream);
}

template <class V>
ForwardKernel forward_kernel_entry() {
  ForwardKernel entry{.id = V::kId, .variant = V::kVariant, .tile = V::kTile, .tracing = kTracing};
  if constexpr (V::kVariant.tile_class == TileClass::kDecode) {
    entry.smem_bytes = sizeof(DecodeStorage<DecodeTraits<V>>);
    entry.launch = &launch_decode<V>;
  } else {
    using Traits = ForwardTraits<V>;
    entry.smem_bytes = kSmemBytes<V>;
    entry.launch = &launch_forward<V>;
    entry.ctas_per_item = Traits::kClusterSize;
    entry.aligns_query_tiles = Traits::kAlignsQueryTiles;
    if constexpr (kMayQuantizeQ<Traits>) {
      entry.quantizes_q = true;
      entry.smem_bytes = std::max(entry.smem_bytes, kSmemBytes<QuantizingQ<V>>);
    }
    if constexpr (Traits::kHasMaskBits) entry.mask_tile_use = MaskTileUse::kUsed;
    if constexpr (Traits::kSegments == 2) entry.second_tile = V::kSecondTile;
  }
  return entry;
}

}  // namespace preflash::sm90
