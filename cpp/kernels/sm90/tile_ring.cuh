// The KV tiles of an item: the full and partial tiles of a custom mask (preflash/mask_tiles.h),
// which one producer warp announces and loading warps and consumers read, each at its own pace; the
// rings of K and V as producer warps fill them; and an item's tiles as every loading warp takes
// them, from the highest keys down.
#pragma once

#include "kernels/sm90/work_items.cuh"
#include "preflash/mask_tiles.h"

namespace preflash::sm90 {

// Goes through an item's row of tiles from the last one on. The lanes of the warp hold a word
// each, so that one load and one ballot pass over 512 empty tiles.
struct MaskTileReader {
  static constexpr int kWarpTiles = 32 * MaskTiles::kWordTiles;

  const std::uint32_t* row;  // of words; null: all tiles are full
  TileRange tiles;           // within the bounds, and those that the bounds do not cut
  int first = 0;             // the first tile of lane 0's word; tiles from here on have been read
  std::uint32_t word = 0;    // this lane's, without tiles before tiles.begin

  template <class Traits>
  CUTE_DEVICE static MaskTileReader of(const ItemView& item, const TileRange& tiles) {
    const HopperSegment& params = item.params;
    // A run may bring a mask that its plan does not use.
    const bool has_mask = params.mask == Mask::kCustom;
    MaskTileReader reader{has_mask ? params.extras.mask_tiles : nullptr, tiles};
    if (reader.row != nullptr) {
      const MaskTilesShape shape{params.rows_per_tile, Traits::kItemTileN, params.group_size};
      const std::int64_t index =
          item.item.row_begin / params.rows_per_tile * shape.row_words(item.request);
      reader.row += __ldg(params.mask_tiles_begin + item.item.request) + index;
    }
    reader.read((tiles.end - 1) / kWarpTiles * kWarpTiles);
    return reader;
  }

  // The last tile before `end` that is not empty; tiles.begin - 1 if there is none.
  CUTE_DEVICE int last_kept_before(int end) {
    for (;;) {
      const std::uint32_t kept = word & MaskTiles::kSome & MaskTiles::before(end - first_of_lane());
      const std::uint32_t lanes = __ballot_sync(0xffffffffu, kept != 0);
      if (lanes != 0) {
        const int lane = 31 - __clz(lanes);
        const std::uint32_t last = __shfl_sync(0xffffffffu, kept, lane);
        return first + lane * MaskTiles::kWordTiles + (31 - __clz(last)) / MaskTiles::kBits;
      }
      if (first <= tiles.begin) return tiles.begin - 1;
      read(first - kWarpTiles);
    }
  }
  // True if the tile found last is full.
  CUTE_DEVICE bool is_full(int tile) const {
    const int lane = (tile - first) / MaskTiles::kWordTiles;
    const std::uint32_t of_lane = __shfl_sync(0xffffffffu, word, lane);
    const int bit = tile % MaskTiles::kWordTiles * MaskTiles::kBits + 1;
    return (of_lane >> bit & 1u) != 0 && !tiles.needs_mask(tile);
  }

 private:
  CUTE_DEVICE int first_of_lane() const { return first + lane_id() * MaskTiles::kWordTiles; }
  CUTE_DEVICE void read(int first_tile) {
    first = first_tile;
    const int tile = first_of_lane();
    const bool in_range = tile < tiles.end && tile + MaskTiles::kWordTiles > tiles.begin;
    word = !in_range ? 0u : row == nullptr ? ~0u : __ldg(row + tile / MaskTiles::kWordTiles);
    word &= ~MaskTiles::before(tiles.begin - tile);
  }
};

// One warp announces items and their tiles: all tiles of an item before the next item.
template <class Traits>
struct MaskTileProducer : ItemProducer<Traits> {
  ProducerPipelineState<Traits::kTileSlots> tile_write = {};
  MaskTileReader reader = {};  // of the item announced last
  int next = -1;  // its tile to announce next; before reader.tiles.begin: there is none

  CUTE_DEVICE void announce_item() {
    this->announce([&](const ItemView& item, const TileRange& tiles) {
      if (tiles.count() == 0) return tiles;
      reader = MaskTileReader::of<Traits>(item, tiles);
      next = reader.last_kept_before(tiles.end);
      return has_tile() ? tiles : TileRange{};
    });
  }

  CUTE_DEVICE bool has_tile() const { return next >= reader.tiles.begin; }

  CUTE_DEVICE void announce_tile() {
    auto& kept = this->smem.kept;
    int word = next * 4 | (reader.is_full(next) ? MaskTile::kFull : 0);
    next = reader.last_kept_before(next);
    if (!has_tile()) word |= MaskTile::kLast;
    int slot = tile_write.index();
    kept.ring.empty[slot].wait(tile_write.phase() ^ 1);
    if (elect_one_sync()) {
      kept.tiles[slot] = {word};
      order_memory_accesses();
      kept.ring.full[slot].arrive();
    }
    __syncwarp();
    tile_write.advance();
  }
};

// Waits for the next announcement. read: a pipeline state.
template <class Traits>
CUTE_DEVICE MaskTile take_mask_tile(SharedStorage<Traits>& smem, auto& read) {
  int slot = read.index();
  smem.kept.ring.full[slot].wait(read.phase());
  order_memory_accesses();
  MaskTile kept{warp_uniform(smem.kept.tiles[slot].word)};
  // NOTE: lane 0 releases the slot after every lane's read: a shuffle orders no memory accesses,
  // __syncwarp() does.
  __syncwarp();
  release(smem.kept.ring.empty[slot]);
  read.advance();
  return kept;
}

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
  SharedStorage<Traits>& smem;
  Announces& announces;
  int begin;
  int tile;

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
  ProducerPipelineState<Traits::kTileSlots> read = {};
  bool is_last;  // the tile taken last

  CUTE_DEVICE int first(const ItemState&) { return take(); }
  CUTE_DEVICE int next() { return is_last ? kNoTile : take(); }

 private:
  CUTE_DEVICE int take() {
    announces.announce_tile();
    MaskTile tile = take_mask_tile(smem, read);
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
