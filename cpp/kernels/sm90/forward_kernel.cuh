// One CTA of the fa3 kernel: its roles, and its share of the planner's work list.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/sm90/forward_epilogue.cuh"

namespace preflash::sm90 {

template <class Traits>
__device__ __forceinline__ void init_barriers(Barriers<Traits::kStages>& barriers, bool gather) {
  int producers = gather ? kWarpgroupThreads : 1;
  barriers.q_full.init(1);
  barriers.q_empty.init(Traits::kConsumerWarps);
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    barriers.k_full[stage].init(producers);
    barriers.k_empty[stage].init(Traits::kConsumerWarps);
    barriers.v_full[stage].init(producers);
    barriers.v_empty[stage].init(Traits::kConsumerWarps);
  }
  for (int slot = 0; slot < kItemSlots; ++slot) {
    barriers.item_full[slot].init(1);
    barriers.item_empty[slot].init(Traits::kConsumerWarps);
  }
  cutlass::arch::fence_barrier_init();
}

template <class Traits>
__device__ __forceinline__ void consume(const HopperParams& params, SharedStorage<Traits>& smem,
                                        int warpgroup, int num_items) {
  using Mainloop = ForwardMainloop<Traits>;
  int thread = threadIdx.x % kWarpgroupThreads;
  Mainloop mainloop{params, smem, warpgroup, thread};
  ConsumerState<Traits> at;
  mainloop.begin_turns();
  for (int i = 0; i < num_items; ++i) {
    smem.barriers.item_full[at.item.index].wait(at.item.phase);
    const ItemState& state = smem.items[at.item.index];
    typename Mainloop::Softmax softmax;
    typename Mainloop::AccumulatorO tOrO;
    if (state.tiles.count() > 0) {
      mainloop.run(state, at, softmax, tOrO);
      at.q.advance();
    } else {
      clear(tOrO);
    }
    int warp = warpgroup * kWarpgroupWarps + thread / 32;
    ForwardEpilogue<Traits>{params, state, smem.o[warp], warp * kWarpRows}.run(softmax, tOrO);
    __syncwarp();
    release(smem.barriers.item_empty[at.item.index]);
    at.item.advance();
  }
}

template <class V>
__global__ void __launch_bounds__(ForwardTraits<V>::kThreads, 1)
    forward_kernel(const __grid_constant__ HopperParams params) {
  using Traits = ForwardTraits<V>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage<Traits>*>(smem_bytes);

  bool gather = params.box.kv_rows == 0;
  if (threadIdx.x == 0) init_barriers<Traits>(smem.barriers, gather);
  __syncthreads();

  int begin = blockIdx.x;
  int end = begin + 1;
  if (params.cta_begin != nullptr) {
    begin = params.cta_begin[blockIdx.x];
    end = params.cta_begin[blockIdx.x + 1];
  }
  int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (gather) {
      produce_rows(params, smem, begin, end);
    } else {
      produce_boxes(params, smem, begin, end);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    consume<Traits>(params, smem, warpgroup - 1, end - begin);
  }
}

}  // namespace preflash::sm90
