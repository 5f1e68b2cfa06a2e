// K and V that are converted on their way: a warpgroup brings tiles as they are stored into the raw
// tile of each operand, or slices of 8 bits into a ring of raw slices, by TMA or gathered; another
// warpgroup dequantises or rotates them from there (RoPE).
#pragma once

#include "kernels/common/dequantize.cuh"
#include "kernels/common/swizzle.cuh"
#include "kernels/sm90/forward_convert.cuh"
#include "kernels/sm90/load_slices.cuh"

namespace preflash::sm90 {

// A ring of raw buffers, the kSlots from kFirst on: rows of 128 bytes, or blocks of them as a tile
// has. Has what loaders need of a TileWriter or SliceWriter.
template <class Traits, int kFirst, int kSlots, class Element_>
struct RawRing {
  using Element = Element_;
  static constexpr bool kIsRaw = true;

  SharedStorage<Traits>& smem;
  ProducerPipelineState<kSlots> next = {};

  CUTE_DEVICE int slot() const { return kFirst + next.index(); }
  CUTE_DEVICE void wait() const { empty().wait(next.phase() ^ 1); }
  CUTE_DEVICE Barrier& empty() const { return conversion_of(smem).ring.empty[slot()]; }
  CUTE_DEVICE TransactionBarrier& full() const { return conversion_of(smem).ring.full[slot()]; }
  CUTE_DEVICE Element* tile() const {
    return reinterpret_cast<Element*>(smem.raw + slot() * (Traits::kTileN * kBlockRowBytes));
  }
};
template <class Traits, Operand kOperand, class Element = std::uint8_t>
struct RawTile : RawRing<Traits, kOperand == Operand::kV, 1, Element> {
  using Source = SourceOf<kOperand>;
  static constexpr bool kIsK = Source::kIsK;
  static constexpr int kBlocks = sizeof(Element) == 1 ? 1 : Traits::kBlocksK;
};
template <class Traits>
struct RawSlice : RawRing<Traits, 0, Traits::kRawSlices, std::uint8_t> {
  static constexpr int kLoaders = Traits::kRawSlices;
};

// Lane layout of a warp over its rows of a raw tile or slice of kColumns: each lane takes pieces of
// 16 elements. Eight lanes read, or store, together: four pieces of row r and four of row r ^ 5.
// Bit 2 of 5 spreads the reads over all banks, bit 0 the stores.
template <class Traits, int kColumns>
struct RawRows {
  static constexpr DType kTo = Traits::kVariant.kv_dtype;
  static constexpr int kPiece = 16;
  static constexpr int kBlocks = kColumns / 64;  // of 16-bit elements
  static constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;
  static constexpr int kPasses = kWarpKeys * kBlocks / 8;  // pieces of a lane
  static_assert(kBlocks == 1 || kBlocks == 2);

  unsigned source;  // of the lane's first piece, from the raw tile's begin on
  unsigned low;     // of its first 8 elements, from the tile's begin on

  CUTE_DEVICE RawRows() {
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
          dequantize<kFrom, kTo>(make_uint2(piece.x, piece.y));
      *reinterpret_cast<uint4*>(tile + of_pass(low ^ kPiece, pass)) =
          dequantize<kFrom, kTo>(make_uint2(piece.z, piece.w));
    }
  }

 private:
  // Rows of a pass: no bit below 8 of theirs is set in the lane's first row.
  CUTE_DEVICE static unsigned of_pass(unsigned first, int pass) {
    const int row = kBlocks == 1 ? pass * 8 : pass / 2 * 8 + pass % 2 * 2;
    return (first ^ row % 8 * kPiece) + row * kBlockRowBytes;
  }
};

// A warp's rows of one raw tile or slice after another, to the ring that the products read.
template <class Raw, class Writer, class Rows>
struct RowWidener {
  Raw raw;
  Writer write;
  Rows rows;

  CUTE_DEVICE void dequantize(DType stored_as) {
    uint4 stored[Rows::kPasses];
    raw.full().wait(raw.next.phase());
    order_memory_accesses();
    rows.read(raw.tile(), stored);
    __syncwarp();
    release(raw.empty());
    raw.next.advance();
    write.wait();
    order_memory_accesses();
    dispatch_8_bits(stored_as,
                    [&](auto from) { rows.template write<from>(stored, write.bytes()); });
    publish_rows(write);
  }
};

// A warpgroup converts the tiles that others load, in the order of GatherLoader ...
template <class Traits>
struct TileConverter {
  template <Operand kOperand>
  using Widener = RowWidener<RawTile<Traits, kOperand>, TileWriter<Traits, kOperand>,
                             RawRows<Traits, Traits::kHeadQk>>;
  static_assert(Traits::kHeadQk == Traits::kHeadVo);

  const SegmentOf<Traits>& segment;
  SharedStorage<Traits>& smem;
  Widener<Operand::kK> k;
  Widener<Operand::kV> v;

  CUTE_DEVICE TileConverter(const SegmentOf<Traits>& segment, SharedStorage<Traits>& smem)
      : segment(segment), smem(smem), k{{smem}, {smem}}, v{{smem}, {smem}} {}

  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto&) {
    for_each_tile(tiles, state, std::identity{}, [&](int tile, bool is_first) {
      if (only_dequantizes<Traits>(segment)) {
        dequantize(k);
      } else {
        rotate(tile * Traits::kTileN);
      }
      if (!is_first) dequantize(v);
    });
    dequantize(v);
  }

 private:
  CUTE_DEVICE void dequantize(auto& operand) const {
    if constexpr (Traits::kWidens) {
      if (dequantizes<Traits>(segment)) operand.dequantize(segment.kv_dtype);
    }
  }
  CUTE_DEVICE void rotate(int first_key) {
    k.raw.full().wait(k.raw.next.phase());
    k.write.wait();
    order_memory_accesses();
    auto rotate = [&](auto from) {
      rotate_rows<Traits, from>(smem, first_key, segment.head_dim_qk, k.raw.tile(), k.write.bytes(),
                                [&] {
                                  __syncwarp();
                                  release(k.raw.empty());
                                });
    };
    if (dequantizes<Traits>(segment)) {
      dispatch_8_bits(segment.kv_dtype, rotate);
    } else {
      rotate(C<Traits::kVariant.kv_dtype>{});
    }
    publish_rows(k.write);
    k.raw.next.advance();
  }
};

// ... or their slices.
template <class Traits>
struct SliceWidener {
  struct Tile {};

  const HopperSegment& params;
  RowWidener<RawSlice<Traits>, SliceWriter<Traits>, RawRows<Traits, Traits::kSliceColumns>> slices;

  CUTE_DEVICE SliceWidener(const HopperSegment& params, SharedStorage<Traits>& smem)
      : params(params), slices{{smem}, {smem}} {}

 protected:
  CUTE_DEVICE const HopperSegment& segment() const { return params; }
  CUTE_DEVICE static Tile find(const ItemKeys&, int) { return {}; }

  template <Operand kOperand>
  CUTE_DEVICE void copy(Tile, int, int, int num_slices) {
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice) slices.dequantize(params.kv_dtype);
  }
};

}  // namespace preflash::sm90
