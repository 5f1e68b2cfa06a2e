// The rings of K and V as producer warps fill them: whole tiles of each, or slices of both; and the
// KV tiles of one item as every loading warp takes them, from the highest keys down.
#pragma once

#include "kernels/sm90/mask_tile_pipeline.cuh"

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
  static constexpr int kBlocks = kIsK ? Traits::kBlocksQk : Traits::kBlocksV;

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

// Comes after the tile of an item's lowest keys. It holds no key, so that looking it up is allowed.
inline constexpr int kNoTile = -1;

// All tiles that the bounds leave.
template <class Traits, class Announces>
struct DenseTileStream {
  int begin;
  int tile;

  CUTE_DEVICE DenseTileStream(SharedStorage<Traits>&, Announces&) {}

  CUTE_DEVICE int first(const ItemState& state) {
    begin = warp_uniform(state.tiles.begin);
    return tile = warp_uniform(state.tiles.end) - 1;
  }
  CUTE_DEVICE int next() { return tile = tile > begin ? tile - 1 : kNoTile; }
};

// The tiles that are announced. Announces: what this warp itself announces (forward_kernel.cuh).
template <class Traits, class Announces>
struct MaskTileStream {
  SharedStorage<Traits>& smem;
  Announces& announces;
  MaskTileConsumer<ProducerPipelineState<Traits::kTileSlots>> reader = {};
  bool is_last;  // the tile taken last

  CUTE_DEVICE MaskTileStream(SharedStorage<Traits>& smem, Announces& announces)
      : smem(smem), announces(announces) {}

  CUTE_DEVICE int first(const ItemState&) { return take(); }
  CUTE_DEVICE int next() { return is_last ? kNoTile : take(); }

 private:
  CUTE_DEVICE int take() {
    announces.announce_tile();
    MaskTile tile = reader.take(smem);
    is_last = tile.is_last();
    return tile.index();
  }
};

template <class Traits, class Announces>
using TileStream = conditional_t<Traits::kHasMaskBits, MaskTileStream<Traits, Announces>,
                                 DenseTileStream<Traits, Announces>>;

// Calls load(look_up(tile), is_first) for each tile of an item. The lookup runs a tile ahead.
CUTE_DEVICE void for_each_tile(auto& tiles, const ItemState& state, const auto& look_up,
                               const auto& load) {
  int tile = tiles.first(state);
  auto found = look_up(tile);
  for (bool is_first = true; tile != kNoTile; is_first = false) {
    const int next = tiles.next();
    auto ahead = look_up(next);
    load(found, is_first);
    tile = next;
    found = ahead;
  }
}

}  // namespace preflash::sm90
