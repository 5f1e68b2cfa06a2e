// The fa3 kernel: a CTA initializes its barriers, and its warpgroups take their roles.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/dependent_launch.cuh"
#include "kernels/sm90/forward_load.cuh"
#include "kernels/sm90/forward_mainloop.cuh"

namespace preflash::sm90 {

template <class Traits>
CUTE_DEVICE void init_barriers(const HopperSegment& segment, SharedStorage<Traits>& smem,
                               bool gather) {
  auto& barriers = smem.barriers;
  // Arrivals that announce what is loaded, and what is converted: one lane of each warp.
  const int loads = gather ? kWarpgroupWarps : 1;
  const int converters = loads_raw<Traits>(segment) ? kWarpgroupWarps : Traits::kProducerWarps;
  const int producers = Traits::kConverts ? converters : loads;
  const int first_warps = gather ? kWarpgroupWarps : kLoaders<Traits>;
  const int loading_warps = first_warps + Traits::kProducerWarps - kWarpgroupWarps;
  constexpr int kConsumers = Traits::kConsumerWarps;
  barriers.q.init(1, kConsumers);
  barriers.k.init(producers, kConsumers);
  barriers.v.init(Traits::kTransposesV ? kWarpgroupWarps : producers, kConsumers);
  barriers.item.init(1, Traits::kConsumerThreads + loading_warps * 32);
  if constexpr (Traits::kTransposesV) smem.raw_ring.init(producers, kWarpgroupWarps);
  if constexpr (Traits::kConverts) {
    conversion_of(smem).ring.init(gather ? kWarpgroupThreads : 1, kWarpgroupWarps);
  }
  if constexpr (Traits::kSliced) {
    smem.slice.ring.init(producers, kConsumers);
    if constexpr (Traits::kClusterSize > 1) smem.slice.pair.p.init(1, 1);
  }
  if constexpr (Traits::kHasMaskBits) smem.kept.ring.init(1, kConsumers + loading_warps);
  cutlass::arch::fence_barrier_init();
}

template <class V>
__global__ void __launch_bounds__(ForwardTraits<V>::kThreads, V::kTile.ctas_per_sm)
    forward_kernel(const __grid_constant__ ParamsOf<ForwardTraits<V>> params) {
  using Traits = ForwardTraits<V>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage<Traits>*>(smem_bytes);

  // The first item needs the tensor maps and its range of the work list: both are requested before
  // the barriers are initialized. All segments are gathered, or none (make_maps()).
  bool gather = params.segments[0].box.kv_rows == 0;
  if (!Traits::kConverts && threadIdx.x == 0) {
    CUTE_UNROLL
    for (int s = 0; s < Traits::kSegments; ++s) {
      const TensorMaps& maps = params.segments[s].maps;
      prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.q));
      if (!gather) {
        prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.k.boxes));
        prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.v.boxes));
      }
    }
  }
  auto [begin, end] = items_of_cta<Traits>(params);
  if (threadIdx.x == kWarpgroupThreads) init_barriers(params.segments[0], smem, gather);
  if constexpr (Traits::kConverts) {
    const auto& segment = params.segments[0];
    if (segment.position == Position::kRope) fill_rotary_tables(segment.rotary, smem);
  }
  if constexpr (Traits::kBiasByProduct) ScoreBias<Traits>::fill_steps(smem);
  let_next_kernel_begin();
  if constexpr (Traits::kClusterSize > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }

  int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup < Traits::kProducers) {
    if constexpr (Traits::kConverts) {
      return produce_converted(params, smem, begin, end, gather, warpgroup);
    }
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if constexpr (Traits::kTransposesV) {
      if (warpgroup == 1) return transpose_values(smem);
    }
    produce(params, smem, begin, end, gather);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    int thread = threadIdx.x % kWarpgroupThreads;
    ForwardMainloop<Traits>(params, smem, warpgroup - Traits::kProducers, thread).run();
    // The other CTA may still arrive at this one's barriers.
    if constexpr (Traits::kClusterSize > 1) cute::cluster_sync();
  }
}

}  // namespace preflash::sm90
