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
  static constexpr int kHead = kIsK ? Traits::kRowQk : Traits::kRowVo;  // columns of a row
  static constexpr int kBlocks = kIsK ? Traits::kBlocksK : Traits::kBlocksV;

  SharedStorage<Traits>& smem;
  ProducerPipelineState<Traits::kStages> next = {};

  __device__ __forceinline__ void wait() const {
    ring().empty[next.index()].wait(next.phase() ^ 1);
  }
  __device__ __forceinline__ auto* tile() const {
    return ring().tiles + next.index() * (Traits::kTileN * kHead);
  }
  __device__ __forceinline__ unsigned char* bytes() const {
    return reinterpret_cast<unsigned char*>(tile());
  }
  __device__ __forceinline__ TransactionBarrier& full() const { return ring().full[next.index()]; }

  // What a tile is loaded from.
  __device__ __forceinline__ static const KvTensor& tensor(const HopperSegment& params) {
    return kIsK ? params.k : params.v;
  }
  __device__ __forceinline__ static int head_dim(const HopperSegment& params) {
    return kIsK ? params.head_dim_qk : params.head_dim_vo;
  }

 private:
  struct Ring {
    typename Traits::ElementKv* tiles;
    TransactionBarrier* full;
    Barrier* empty;
  };
  __device__ __forceinline__ Ring ring() const {
    auto& barriers = smem.barriers;
    if constexpr (kIsK) return {smem.k, barriers.k_full, barriers.k_empty};
    if constexpr (Traits::kTransposesV) return {smem.raw, smem.raw_full, smem.raw_empty};
    return {smem.v, barriers.v_full, barriers.v_empty};
  }
};

}  // namespace preflash::sm90
