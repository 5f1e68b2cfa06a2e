// The fa3 kernel: a CTA initializes its barriers, then its warpgroups take their roles and work
// through the CTA's share of the planner's work list.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/dependent_launch.cuh"
#include "kernels/sm90/forward_load.cuh"
#include "kernels/sm90/forward_mainloop.cuh"

namespace preflash::sm90 {

// Arrivals that announce a tile of K or V. Where operands are converted, one lane of each warp
// that writes the tile arrives.
template <class Traits>
__device__ __forceinline__ int arrivals_of_tile(const HopperSegment& segment, bool gather) {
  if constexpr (Traits::kConverts) {
    return only_widens<Traits>(segment) ? kWarpgroupWarps : Traits::kProducerWarps;
  }
  return gather ? kWarpgroupThreads : 1;
}

template <class Traits>
__device__ __forceinline__ void init_barriers(const HopperSegment& segment,
                                              SharedStorage<Traits>& smem, bool gather) {
  auto& barriers = smem.barriers;
  int producers = arrivals_of_tile<Traits>(segment, gather);
  int transposers = Traits::kTransposesV ? kWarpgroupWarps : 0;
  int loading_warps =
      gather ? Traits::kProducerWarps : (Traits::kSliced ? kSliceLoaders : 2) + transposers;
  if (widens_raw_tiles<Traits>(segment)) loading_warps = 2 + kWarpgroupWarps;
  for (int stage = 0; stage < Traits::kQStages; ++stage) {
    barriers.q_full[stage].init(1);
    barriers.q_empty[stage].init(Traits::kConsumerWarps);
  }
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    barriers.k_full[stage].init(producers);
    barriers.k_empty[stage].init(Traits::kConsumerWarps);
    barriers.v_full[stage].init(Traits::kTransposesV ? transposers : producers);
    barriers.v_empty[stage].init(Traits::kConsumerWarps);
    if constexpr (Traits::kTransposesV) {
      smem.raw_full[stage].init(producers);
      smem.raw_empty[stage].init(transposers);
    }
  }
  if constexpr (Traits::kLoadsRawTiles) {
    for (int operand = 0; operand < 2; ++operand) {
      smem.raw_full[operand].init(1);
      smem.raw_empty[operand].init(kWarpgroupWarps);
    }
  }
  if constexpr (Traits::kSliced) {
    for (int slot = 0; slot < Traits::kSliceSlots; ++slot) {
      smem.slice_full[slot].init(producers);
      smem.slice_empty[slot].init(Traits::kConsumerWarps);
    }
  }
  for (int slot = 0; slot < kItemSlots; ++slot) {
    barriers.item_full[slot].init(1);
    barriers.item_empty[slot].init(Traits::kConsumerThreads + loading_warps * 32);
  }
  if constexpr (Traits::kHasMaskBits) {
    for (int slot = 0; slot < Traits::kTileSlots; ++slot) {
      smem.kept.tile_full[slot].init(1);
      smem.kept.tile_empty[slot].init(Traits::kConsumerWarps + loading_warps);
    }
  }
  cutlass::arch::fence_barrier_init();
}

// A CTA's items. CTAs that make parts of the columns of the same items share their lists.
struct ItemSpan {
  int begin;
  int end;
};
template <class Traits>
__device__ __forceinline__ ItemSpan items_of_cta(const ParamsOf<Traits>& params) {
  int parts = column_parts<Traits>(params.segments[0].head_dim_vo);
  int first = static_cast<int>(blockIdx.x) / parts * parts;
  int last = min(first + parts, params.num_lists);
  if (params.cta_begin == nullptr) return {first, last};
  return {__ldg(params.cta_begin + first), __ldg(params.cta_begin + last)};
}

template <class V>
__global__ void __launch_bounds__(ForwardTraits<V>::kThreads, V::kTile.ctas_per_sm)
    forward_kernel(const __grid_constant__ ParamsOf<ForwardTraits<V>> params) {
  using Traits = ForwardTraits<V>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage<Traits>*>(smem_bytes);

  // The first item needs the tensor maps and its range of the work list: both are requested before
  // the barriers are initialized.
  // All segments are gathered, or none (launch_forward()).
  bool gather = Traits::kConverts || params.segments[0].box.kv_rows == 0;
  if (!Traits::kConverts && threadIdx.x == 0) {
    CUTE_UNROLL
    for (int s = 0; s < Traits::kSegments; ++s) {
      const TensorMaps& maps = params.segments[s].maps;
      prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.q));
      if (!gather) {
        prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.k));
        prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.v));
      }
    }
  }
  auto [begin, end] = items_of_cta<Traits>(params);
  if (threadIdx.x == kWarpgroupThreads) init_barriers(params.segments[0], smem, gather);
  if constexpr (Traits::kConverts) fill_rotary_tables(params.segments[0].rotary, smem);
  if constexpr (Traits::kBiasByProduct) ScoreBias<Traits>::fill_steps(smem);
  let_next_kernel_begin();
  __syncthreads();

  int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup < Traits::kProducers) {
    if constexpr (Traits::kLoadsRawTiles) {
      if (widens_raw_tiles<Traits>(params.segments[0])) {
        if (warpgroup == 0) {
          cutlass::arch::warpgroup_reg_dealloc<32>();
          return produce_raw_tiles(params, smem, begin, end);
        }
        cutlass::arch::warpgroup_reg_dealloc<2 * Traits::kProducerRegisters - 32>();
        return widen_raw_tiles(params.segments[0], smem);
      }
    }
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if constexpr (Traits::kTransposesV) {
      if (warpgroup == 1) return transpose_values(smem);
    }
    if constexpr (Traits::kConverts) {
      produce_converted(params, smem, begin, end);
    } else if (gather) {
      produce_gather(params, smem, begin, end);
    } else {
      produce_tma(params, smem, begin, end);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    int thread = threadIdx.x % kWarpgroupThreads;
    ForwardMainloop<Traits>(params, smem, warpgroup - Traits::kProducers, thread).run();
  }
}

}  // namespace preflash::sm90
