// The buffers of K and V as a consumer warpgroup uses them: it waits for a tile, issues its product
// and releases it, in the order of the loop. Where K and V come in slices (slice_ring.cuh), a
// tile's product is made of theirs.
#pragma once

#include "kernels/sm90/forward_products.cuh"
#include "kernels/sm90/slice_ring.cuh"

namespace preflash::sm90 {

// Lets one warpgroup at a time issue its products: 0, 1, ... and 0 again. At the start the last
// warpgroup arrives for warpgroup 0. Where tiles arrive in slices, the warpgroups use each slice at
// about the same time, without an order.
template <class Traits>
struct OrderBarrier {
  int warpgroup;  // among consumers

  __device__ __forceinline__ void init() const {
    if (warpgroup == Traits::kConsumers - 1) arrive();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (Traits::kSliced) return;
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads, NamedBarriers::kOrder + warpgroup);
  }
  __device__ __forceinline__ void arrive() const {
    if constexpr (Traits::kSliced) return;
    int next = warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads, NamedBarriers::kOrder + next);
  }
};

template <class Traits>
struct KvConsumer {
  // Products that may run while S is waited for: those of V, which are issued behind it.
  static constexpr int kProductsOfV = Traits::kSliced ? Traits::kSlicesV : 1;

  SharedStorage<Traits>& smem;
  OrderBarrier<Traits> order;
  ConsumerPipelineState<Traits::kStages> k_read = {};
  ConsumerPipelineState<Traits::kStages> v_read = {};
  SliceReader<Traits> slices;

  __device__ __forceinline__ KvConsumer(const HopperSegment& params, SharedStorage<Traits>& smem,
                                        int warpgroup)
      : smem(smem), order{warpgroup}, slices(params, smem) {}

  // S = Q K^T, in this warpgroup's turn. The last slice of K stays until S is complete; so do those
  // of V for O.
  template <class Q>
  __device__ __forceinline__ void issue_qk(ForwardProducts<Traits>& products, const Q& tSrQ) {
    if constexpr (Traits::kSliced) {
      products.issue_qk_slice(tSrQ, 0, slices.wait());
#pragma unroll 1
      for (int slice = 1; slice < slices.num_k; ++slice) {
        products.issue_qk_slice(tSrQ, slice, slices.wait());
        warpgroup_wait<1>();
        slices.release_one();
      }
    } else {
      wait_for_k();
      products.issue_qk(tSrQ, k_read.index());
    }
  }
  // O += P V
  __device__ __forceinline__ void issue_pv(ForwardProducts<Traits>& products) {
    if constexpr (Traits::kSliced) {
      CUTE_UNROLL
      for (int slice = 0; slice < Traits::kSlicesV; ++slice) {
        products.issue_pv_slice(slice, slices.wait());
      }
    } else {
      wait_for_v();
      products.issue_pv(v_read.index());
    }
  }

  __device__ __forceinline__ void release_k() {
    if constexpr (Traits::kSliced) {
      slices.release_one();
    } else {
      release(smem.barriers.k_empty[k_read.index()]);
      k_read.advance();
    }
  }
  __device__ __forceinline__ void release_v() {
    if constexpr (Traits::kSliced) {
      CUTE_UNROLL
      for (int slice = 0; slice < Traits::kSlicesV; ++slice) slices.release_one();
    } else {
      release(smem.barriers.v_empty[v_read.index()]);
      v_read.advance();
    }
  }

  // A skipped tile belongs to other warpgroups: this one only passes the order barrier and releases
  // the buffers.
  __device__ __forceinline__ void skip_k() {
    wait_for_k();
    order.arrive();
    release(smem.barriers.k_empty[k_read.index()]);
    k_read.advance();
  }
  __device__ __forceinline__ void skip_v() {
    wait_for_v();
    __syncwarp();  // no lane may still wait for this phase when the buffer is filled again
    release(smem.barriers.v_empty[v_read.index()]);
    v_read.advance();
  }

  __device__ __forceinline__ void wait_for_k() const {
    smem.barriers.k_full[k_read.index()].wait(k_read.phase());
    order.wait();
  }
  __device__ __forceinline__ void wait_for_v() const {
    smem.barriers.v_full[v_read.index()].wait(v_read.phase());
  }
};

}  // namespace preflash::sm90
