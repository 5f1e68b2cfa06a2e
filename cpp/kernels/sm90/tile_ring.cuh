// The rings of K and V as producer warps fill them: whole tiles of each, or slices of both.
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

namespace preflash::sm90 {

enum class Operand { kK, kV };

// Source tensor of an operand's tiles.
template <Operand kOperand>
struct SourceOf {
  static constexpr bool kIsK = kOperand == Operand::kK;

  CUTE_DEVICE static const KvTensor& tensor(const HopperSegment& params) {
    return kIsK ? params.k : params.v;
  }
  CUTE_DEVICE static int head_dim(const HopperSegment& params) {
    return kIsK ? params.head_dim_qk : params.head_dim_vo;
  }
};

// Position of a producer warp in the ring of whole tiles of an operand.
template <class Traits, Operand kOperand>
struct TileWriter {
  using Element = typename Traits::ElementKv;
  using Source = SourceOf<kOperand>;
  static constexpr bool kIsK = Source::kIsK;
  static constexpr bool kIsRaw = false;                                 // RawTile is
  static constexpr bool kIsTurned = !kIsK && Traits::kTransposesV;      // arrives as it is stored
  static constexpr int kHead = kIsK ? Traits::kRowQk : Traits::kRowVo;  // columns of a row
  static constexpr int kBlocks = kIsK ? Traits::kBlocksK : Traits::kBlocksV;

  SharedStorage<Traits>& smem;
  ProducerPipelineState<Traits::kStages> next = {};

  CUTE_DEVICE auto& ring() const {
    if constexpr (kIsTurned) return smem.raw_ring;
    return kIsK ? smem.barriers.k : smem.barriers.v;
  }
  CUTE_DEVICE void wait() const { ring().empty[next.index()].wait(next.phase() ^ 1); }
  CUTE_DEVICE TransactionBarrier& full() const { return ring().full[next.index()]; }
  CUTE_DEVICE auto* tile() const {
    const int first = next.index() * (Traits::kTileN * kHead);
    if constexpr (kIsTurned) return smem.raw + first;
    return (kIsK ? smem.k : smem.v) + first;
  }
  CUTE_DEVICE unsigned char* bytes() const { return reinterpret_cast<unsigned char*>(tile()); }
};

// Position of a producer warp in the ring of slices (KvBuffers in shared_storage.cuh).
template <class Traits>
struct SliceWriter {
  using Element = typename Traits::ElementKv;
  static constexpr bool kIsRaw = false;
  // Warps that issue slices in turns, because small pages have many boxes. NOTE: no more than there
  // are slots, or a warp would mistake a slot's phase for the next.
  static constexpr int kLoaders = 3;

  SharedStorage<Traits>& smem;
  ConsumerPipelineState<Traits::kSliceSlots> next = {};

  CUTE_DEVICE void wait() const { smem.slice.ring.empty[next.index()].wait(next.phase() ^ 1); }
  CUTE_DEVICE TransactionBarrier& full() const { return smem.slice.ring.full[next.index()]; }
  CUTE_DEVICE auto* tile() const { return smem.slices[next.index()]; }
  CUTE_DEVICE unsigned char* bytes() const { return reinterpret_cast<unsigned char*>(tile()); }
};

// Slices of a K tile that hold columns of the head. NOTE: V always takes all kSlicesV: with a
// branch around a product ptxas would wait for the products before it.
template <class Traits>
CUTE_DEVICE int slices_of_k(const HopperSegment& params) {
  return ceil_div(params.head_dim_qk, Traits::kSliceColumns);
}

}  // namespace preflash::sm90
