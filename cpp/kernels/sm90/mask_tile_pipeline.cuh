// The pipeline of the full and partial KV tiles of a custom mask (preflash/mask_tiles.h). One
// producer warp announces them, from an item's highest keys down; loading warps and consumers read
// that, each at its own pace.
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
  CUTE_DEVICE static MaskTileReader of(const HopperSegment& params, const WorkItem& item,
                                       const RequestInfo& request, const TileRange& tiles) {
    // A run may bring a mask that its plan does not use.
    const bool has_mask = params.mask == Mask::kCustom;
    MaskTileReader reader{has_mask ? params.extras.mask_tiles : nullptr, tiles};
    if (reader.row != nullptr) {
      const MaskTilesShape shape{params.rows_per_tile, Traits::kItemTileN, params.group_size};
      const std::int64_t index = item.row_begin / params.rows_per_tile * shape.row_words(request);
      reader.row += __ldg(params.mask_tiles_begin + item.request) + index;
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
    this->announce([&](const WorkItem& item, const RequestInfo& request, const TileRange& tiles) {
      if (tiles.count() == 0) return tiles;
      reader = MaskTileReader::of<Traits>(this->params.segment_of(request), item, request, tiles);
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

template <class PipelineState>
struct MaskTileConsumer {
  PipelineState read = {};

  template <class Traits>
  CUTE_DEVICE MaskTile take(SharedStorage<Traits>& smem) {
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
};

}  // namespace preflash::sm90
