// Loads of 8-bit K and V without RoPE where TMA can: ragged tensors, and pages whose size is a
// multiple of 8 rows. Boxes bring a tile as it is stored into the operand's raw tile; a warpgroup
// that issues nothing dequantises it from there.
#pragma once

#include "kernels/common/swizzle.cuh"
#include "kernels/common/widen.cuh"
#include "kernels/sm90/copy_rows.cuh"
#include "kernels/sm90/load_tma.cuh"

namespace preflash::sm90 {

// The raw tile of an operand: a ring of one, rows of 128 bytes. Has what TmaLoader needs of a
// TileWriter.
template <class Traits, Operand kOperand>
struct RawTile {
  using Element = std::uint8_t;
  static constexpr bool kIsK = kOperand == Operand::kK;
  static constexpr int kHead = kBlockRowBytes;
  static constexpr int kBlocks = 1;

  SharedStorage<Traits>& smem;
  ProducerPipelineState<1> next = {};

  CUTE_DEVICE void wait() const { empty().wait(next.phase() ^ 1); }
  CUTE_DEVICE Barrier& empty() const { return smem.raw_empty[!kIsK]; }
  CUTE_DEVICE TransactionBarrier& full() const { return smem.raw_full[!kIsK]; }
  CUTE_DEVICE Element* tile() const {
    return smem.raw + (kIsK ? 0 : Traits::kTileN * kBlockRowBytes);
  }
};

// How the lanes of a warp share its rows of a raw tile: each takes pieces of 16 elements. Eight
// lanes read, or store, together: four pieces of row r and four of row r ^ 5. Bit 2 of 5 spreads
// what they read over all banks, bit 0 what they store.
template <class Traits>
struct RawTileRows {
  static constexpr DType kTo = Traits::kVariant.kv_dtype;
  static constexpr int kPiece = 16;
  static constexpr int kBlocks = Traits::kHeadQk / 64;  // of 16-bit elements
  static constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;
  static constexpr int kPasses = kWarpKeys * kBlocks / 8;  // pieces of a lane
  static_assert(Traits::kHeadQk == Traits::kHeadVo && (kBlocks == 1 || kBlocks == 2));

  unsigned source;  // of the lane's first piece, from the raw tile's begin on
  unsigned low;     // of its first 8 elements, from the tile's begin on

  CUTE_DEVICE RawTileRows() {
    const unsigned pair = lane_id() / 8;
    const unsigned block = pair % kBlocks;
    const unsigned row = threadIdx.x / 32 % kWarpgroupWarps * kWarpKeys +
                         (pair / kBlocks ^ (lane_id() / 4 % 2 == 0 ? 0 : 5));
    const unsigned piece = lane_id() % 4;
    source = row * kBlockRowBytes + (block * 4 + piece ^ row % 8) * kPiece;
    low = swizzled<Traits::kTileN>(row, block * 64 + piece * kPiece);
  }

  CUTE_DEVICE void read(const std::uint8_t* tile, uint4 (&stored)[kPasses]) const {
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      stored[pass] = *reinterpret_cast<const uint4*>(tile + of_pass(source, pass));
    }
  }
  template <DType kFrom>
  CUTE_DEVICE void write(const uint4 (&stored)[kPasses], unsigned char* tile) const {
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint4& piece = stored[pass];
      *reinterpret_cast<uint4*>(tile + of_pass(low, pass)) =
          widen<kFrom, kTo>(make_uint2(piece.x, piece.y));
      *reinterpret_cast<uint4*>(tile + of_pass(low ^ kPiece, pass)) =
          widen<kFrom, kTo>(make_uint2(piece.z, piece.w));
    }
  }

 private:
  // Rows of a pass: no bit below 8 of theirs is set in the lane's first row.
  CUTE_DEVICE static unsigned of_pass(unsigned first, int pass) {
    const int row = kBlocks == 1 ? pass * 8 : pass / 2 * 8 + pass % 2 * 2;
    return (first ^ row % 8 * kPiece) + row * kBlockRowBytes;
  }
};

// A warpgroup dequantises the tiles that others load.
template <class Traits>
struct TileWidener {
  template <Operand kOperand>
  struct Stage {
    RawTile<Traits, kOperand> raw;
    TileWriter<Traits, kOperand> tile;
  };

  DType stored_as;
  RawTileRows<Traits> rows;
  Stage<Operand::kK> k;
  Stage<Operand::kV> v;

  CUTE_DEVICE TileWidener(const HopperSegment& segment, SharedStorage<Traits>& smem)
      : stored_as(segment.kv_dtype), k{{smem}, {smem}}, v{{smem}, {smem}} {}

  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto&) {
    for (int tile = tiles.first(state); tile != kNoTile; tile = tiles.next()) {
      widen_tile(k);
      widen_tile(v);
    }
  }

 private:
  template <class Stage>
  CUTE_DEVICE void widen_tile(Stage& stage) const {
    auto& [raw, tile] = stage;
    uint4 stored[RawTileRows<Traits>::kPasses];
    raw.full().wait(raw.next.phase());
    rows.read(raw.tile(), stored);
    __syncwarp();
    release(raw.empty());
    raw.next.advance();
    tile.wait();
    dispatch_8_bits(stored_as, [&, &tile = tile](auto from) {
      rows.template write<from>(stored, tile.bytes());
    });
    publish_rows(tile);
  }
};

}  // namespace preflash::sm90
