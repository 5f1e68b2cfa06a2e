// The rings of whole tiles of K and of V, as a loader fills them. Slices: slice_ring.cuh.
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

namespace preflash::sm90 {

enum class Operand { kK, kV };

// Where a producer warp stands.
template <class Traits, Operand kOperand>
struct TileWriter {
  static constexpr bool kIsK = kOperand == Operand::kK;
  static constexpr bool kIsRaw = !kIsK && Traits::kTransposesV;
  static constexpr int kHead = kIsK ? Traits::kRowQk : Traits::kRowVo;  // columns of a row
  static constexpr int kBlocks = kIsK ? Traits::kBlocksK : Traits::kBlocksV;

  SharedStorage<Traits>& smem;
  ProducerPipelineState<Traits::kStages> next = {};

  __device__ __forceinline__ void wait() const {
    if constexpr (kIsRaw) {
      smem.raw_empty[next.index()].wait(next.phase() ^ 1);
    } else {
      auto& empty = kIsK ? smem.barriers.k_empty : smem.barriers.v_empty;
      empty[next.index()].wait(next.phase() ^ 1);
    }
  }
  __device__ __forceinline__ auto* tile() const {
    if constexpr (kIsRaw) {
      return smem.raw + next.index() * (Traits::kTileN * kHead);
    } else {
      return (kIsK ? smem.k : smem.v) + next.index() * (Traits::kTileN * kHead);
    }
  }
  __device__ __forceinline__ unsigned char* bytes() const {
    return reinterpret_cast<unsigned char*>(tile());
  }
  __device__ __forceinline__ TransactionBarrier& full() const {
    if constexpr (kIsRaw) {
      return smem.raw_full[next.index()];
    } else {
      return (kIsK ? smem.barriers.k_full : smem.barriers.v_full)[next.index()];
    }
  }

  // What a tile is loaded from.
  __device__ __forceinline__ static const KvTensor& tensor(const HopperSegment& params) {
    return kIsK ? params.k : params.v;
  }
  __device__ __forceinline__ static int head_dim(const HopperSegment& params) {
    return kIsK ? params.head_dim_qk : params.head_dim_vo;
  }
};

}  // namespace preflash::sm90
