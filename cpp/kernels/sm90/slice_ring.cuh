// The ring of slices of K and V (KvBuffers in shared_storage.cuh), as its two sides see it.
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

namespace preflash::sm90 {

// Slices of a K tile that hold columns of the head. NOTE: V always has kSlicesV: a branch around a
// product would make ptxas wait for those before it.
template <class Traits>
__device__ __forceinline__ int slices_of_k(const HopperSegment& params) {
  return ceil_div(params.head_dim_qk, Traits::kSliceColumns);
}

// Where a consumer warpgroup stands. It uses slices in order and releases them in order, later.
template <class Traits>
struct SliceReader {
  SharedStorage<Traits>& smem;
  int num_k;  // slices of a K tile
  ConsumerPipelineState<Traits::kSliceSlots> next = {};
  ConsumerPipelineState<Traits::kSliceSlots> held = {};  // the first that is not released

  __device__ __forceinline__ SliceReader(const HopperSegment& params, SharedStorage<Traits>& smem)
      : smem(smem), num_k(slices_of_k<Traits>(params)) {}

  // Waits for the next slice; returns its slot.
  __device__ __forceinline__ int wait() {
    smem.slice_full[next.index()].wait(next.phase());
    int slot = next.index();
    next.advance();
    return slot;
  }
  __device__ __forceinline__ void release_one() {
    release(smem.slice_empty[held.index()]);
    held.advance();
  }
};

// Where a producer warp stands; TileWriter (tile_ring.cuh) with whole tiles.
template <class Traits>
struct SliceWriter {
  SharedStorage<Traits>& smem;
  ConsumerPipelineState<Traits::kSliceSlots> next = {};

  __device__ __forceinline__ void wait() const {
    smem.slice_empty[next.index()].wait(next.phase() ^ 1);
  }
  __device__ __forceinline__ auto* slice() const { return smem.slices[next.index()]; }
  __device__ __forceinline__ unsigned char* bytes() const {
    return reinterpret_cast<unsigned char*>(slice());
  }
  __device__ __forceinline__ TransactionBarrier& full() const {
    return smem.slice_full[next.index()];
  }
};

}  // namespace preflash::sm90
