// Loads of 8-bit K and V without RoPE. A warp has rows of its own, in two parts, of which a lane
// reads only what it has copied: one part is in flight while the other is dequantised.
#pragma once

#include "kernels/common/swizzle.cuh"
#include "kernels/common/widen.cuh"
#include "kernels/sm90/copy_rows.cuh"
#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/tile_stream.cuh"

namespace preflash::sm90 {

// Whether the launch loads tiles in this way, by its run-time options.
template <class Traits>
CUTE_HOST_DEVICE bool only_widens(const HopperSegment& params) {
  return Traits::kLoadsRawTiles && size_of(params.kv_dtype) == 1 &&
         params.position != Position::kRope;
}
// Whether TMA brings the tiles as they are stored (load_raw_tiles.cuh).
template <class Traits>
CUTE_DEVICE bool widens_raw_tiles(const HopperSegment& params) {
  return only_widens<Traits>(params) && params.box.kv_rows != 0;
}

// A warp's rows of kColumns columns, on their way from memory to a tile. A lane takes pieces of 16
// elements. Eight lanes store together, 16 bytes each: four pieces of two neighbouring rows, which
// the swizzle spreads over all banks.
template <class Traits, int kColumns>
struct WideningRows {
  static constexpr DType kTo = Traits::kVariant.kv_dtype;
  static constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;
  static constexpr int kPiece = 16;
  static constexpr int kBlocks = kColumns / 64;
  static constexpr int kRowsAtOnce = 8 / kBlocks;
  static constexpr int kParts = 2;
  static constexpr int kPartRows = kWarpKeys / kParts;
  static constexpr int kPasses = kPartRows / kRowsAtOnce;  // of a part: pieces of a lane
  static_assert(kBlocks == 1 || kBlocks == 2);
  static_assert(kWarpKeys <= 32, "a lane looks up the page of one row");
  static_assert(kPartRows % 8 == 0 && kPasses * kRowsAtOnce == kPartRows);

  uint4* raw;  // [part, pass, lane] of the warp's pieces, from this lane's first one on

  // ring: [tile n, kColumns] of all warps
  CUTE_DEVICE explicit WideningRows(unsigned char* ring)
      : raw(reinterpret_cast<uint4*>(ring + first_row() * kColumns) + lane_id()) {}

  CUTE_DEVICE static int first_row() { return threadIdx.x / 32 % kWarpgroupWarps * kWarpKeys; }

  // Rows of a tile in memory, from `column` of the head on.
  struct Source {
    const KvTensor& tensor;
    int head_dim;
    int column;
    const ItemKeys& item;
    KeySlot slot;  // of row lane_id() of the warp's
    int tile;
  };

  // Requests a part of a tile: a group, an empty one where there is no such tile.
  template <int kPart>
  CUTE_DEVICE void copy(const Source& from) const {
    if (from.tile != kNoTile) {
      const bool all_columns = from.column + kColumns <= from.head_dim;
      copy_tile<Traits>(from.item, from.tile * Traits::kTileN, all_columns,
                        [&](auto rows) { copy_rows<kPart, rows>(from); });
    }
    cp_async_fence();
  }

  // Writes a part of a tile, and calls copy_next(part) as soon as its raw rows have been read.
  template <int kPart>
  CUTE_DEVICE void write(DType from, unsigned char* tile, const auto& copy_next) const {
    cp_async_wait<kParts - 1>();
    uint4 stored[kPasses];
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) stored[pass] = raw[(kPart * kPasses + pass) * 32];
    copy_next(Int<kPart>{});
    dispatch_8_bits(from, [&](auto narrow) { write_rows<kPart, narrow>(stored, tile); });
  }

 private:
  CUTE_DEVICE static int lane_row() { return lane_id() / (8 * kBlocks) * 2 + lane_id() / 4 % 2; }
  CUTE_DEVICE static int lane_block() { return lane_id() / 8 % kBlocks; }
  CUTE_DEVICE static int lane_column() { return lane_id() % 4 * kPiece; }  // of the block

  template <int kPart, Rows kRows>
  CUTE_DEVICE void copy_rows(const Source& from) const {
    const KvTensor& tensor = from.tensor;
    int column = from.column + lane_block() * 64 + lane_column();
    const unsigned char* source = static_cast<const unsigned char*>(tensor.data) +
                                  from.item.kv_head * tensor.stride_head + column;
    std::int64_t lane_offset = slot_offset(tensor, from.slot);
    std::uint32_t target = cast_smem_ptr_to_uint(raw);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int row = kPart * kPartRows + pass * kRowsAtOnce + lane_row();
      const unsigned char* address = source + __shfl_sync(0xffffffffu, lane_offset, row);
      int key = from.tile * Traits::kTileN + first_row() + row;
      copy_piece<kRows>(from.item, key, from.head_dim - column,
                        target + (kPart * kPasses + pass) * 32 * kPiece, address);
    }
  }

  template <int kPart, DType kFrom>
  CUTE_DEVICE static void write_rows(const uint4 (&stored)[kPasses], unsigned char* tile) {
    const int row = first_row() + lane_row();
    const int column = lane_block() * 64 + lane_column();
    SwizzledColumn<Traits::kTileN> low(tile, row, column), high(tile, row, column + 8);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int offset = kPart * kPartRows + pass * kRowsAtOnce;
      const uint4& piece = stored[pass];
      *reinterpret_cast<uint4*>(low.at(offset)) = widen<kFrom, kTo>(make_uint2(piece.x, piece.y));
      *reinterpret_cast<uint4*>(high.at(offset)) = widen<kFrom, kTo>(make_uint2(piece.z, piece.w));
    }
  }
};

// Whole tiles of an operand.
template <class Traits, Operand kOperand>
struct WideningLoader {
  using Writer = TileWriter<Traits, kOperand>;
  using Rows = WideningRows<Traits, Writer::kHead>;

  const HopperSegment& params;
  Writer write;
  Rows rows;
  ItemKeys item;

  CUTE_DEVICE WideningLoader(const HopperSegment& params, SharedStorage<Traits>& smem)
      : params(params), write{smem}, rows(write.raw()) {}

  // Prefetches the rows of the tile after the next into the L2.
  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto& after_first) {
    item = ItemKeys::of(state);
    int tile = tiles.first(state);
    KeySlot slot = find_slot_of_lane(tile);
    int next = tiles.next();
    KeySlot next_slot = find_slot_of_lane(next);
    rows.template copy<0>(source(slot, tile));
    rows.template copy<1>(source(slot, tile));
    after_first();
#pragma unroll 1
    while (tile != kNoTile) {
      const int ahead = tiles.next();
      KeySlot ahead_slot = find_slot_of_lane(ahead);
      write.wait();
      auto copy_next = [&](auto part) { rows.template copy<part>(source(next_slot, next)); };
      rows.template write<0>(params.kv_dtype, write.bytes(), copy_next);
      rows.template write<1>(params.kv_dtype, write.bytes(), copy_next);
      publish_rows(write);
      prefetch(ahead_slot);
      tile = next;
      next = ahead;
      next_slot = ahead_slot;
    }
  }

 private:
  CUTE_DEVICE const KvTensor& tensor() const { return Writer::tensor(params); }
  CUTE_DEVICE typename Rows::Source source(KeySlot slot, int tile) const {
    return {tensor(), Writer::head_dim(params), 0, item, slot, tile};
  }
  CUTE_DEVICE KeySlot find_slot_of_lane(int tile) const {
    return find_slot_within(params, item, tile * Traits::kTileN + Rows::first_row() + lane_id());
  }
  CUTE_DEVICE void prefetch(KeySlot slot) const {
    const auto* head =
        static_cast<const unsigned char*>(tensor().data) + item.kv_head * tensor().stride_head;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(head + slot_offset(tensor(), slot)));
  }
};

}  // namespace preflash::sm90
