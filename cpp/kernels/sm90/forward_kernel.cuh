// The fa3 kernel: a CTA initializes its barriers, then its warpgroups take their roles and work
// through the CTA's share of the planner's work list.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/sm90/forward_load.cuh"
#include "kernels/sm90/forward_mainloop.cuh"

namespace preflash::sm90 {

template <class Traits>
__device__ __forceinline__ void init_barriers(SharedStorage<Traits>& smem, bool gather) {
  auto& barriers = smem.barriers;
  int producers = gather ? kWarpgroupThreads : 1;
  int loading_warps = gather ? kWarpgroupWarps : 2;
  for (int stage = 0; stage < Traits::kQStages; ++stage) {
    barriers.q_full[stage].init(1);
    barriers.q_empty[stage].init(Traits::kConsumerWarps);
  }
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    barriers.k_full[stage].init(producers);
    barriers.k_empty[stage].init(Traits::kConsumerWarps);
    barriers.v_full[stage].init(producers);
    barriers.v_empty[stage].init(Traits::kConsumerWarps);
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

template <class V>
__global__ void __launch_bounds__(ForwardTraits<V>::kThreads, V::kTile.ctas_per_sm)
    forward_kernel(const __grid_constant__ ParamsOf<ForwardTraits<V>> params) {
  using Traits = ForwardTraits<V>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage<Traits>*>(smem_bytes);

  // The first item needs the tensor maps and its range of the work list: both are requested before
  // the barriers are initialized.
  const auto& segment = params.segments[0];
  bool gather = Traits::kTransforms || segment.box.kv_rows == 0;
  if (!Traits::kTransforms && threadIdx.x == 0) {
    prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&segment.maps.q));
    if (!gather) {
      prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&segment.maps.k));
      prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&segment.maps.v));
    }
  }
  int begin = blockIdx.x;
  int end = begin + 1;
  if (params.cta_begin != nullptr) {
    begin = __ldg(params.cta_begin + blockIdx.x);
    end = __ldg(params.cta_begin + blockIdx.x + 1);
  }
  if (threadIdx.x == kWarpgroupThreads) init_barriers(smem, gather);
  if constexpr (Traits::kTransforms) fill_rotary_tables(segment.rotary, smem);
  __syncthreads();

  int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if constexpr (Traits::kTransforms) {
      produce_transformed(params, smem, begin, end);
    } else if constexpr (Traits::kHasMaskBits) {
      if (gather) {
        produce_kept_gather(params, smem, begin, end);
      } else {
        produce_kept_tma(params, smem, begin, end);
      }
    } else if (gather) {
      produce_gather(params, smem, begin, end);
    } else {
      produce_tma(params, smem, begin, end);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    int thread = threadIdx.x % kWarpgroupThreads;
    ForwardMainloop<Traits>(segment, smem, warpgroup - 1, thread).run();
  }
}

}  // namespace preflash::sm90
