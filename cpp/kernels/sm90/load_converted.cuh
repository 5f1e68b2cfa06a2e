// K and V that are converted on their way: 8 bits are dequantised exactly to 16, and keys are
// rotated (RoPE). A warpgroup brings tiles as they are stored into the raw tile of each operand, or
// slices of 8 bits into a ring of raw slices, by TMA or gathered; another warpgroup converts them
// from there.
#pragma once

#include "kernels/common/dequantize.cuh"
#include "kernels/common/lane_angles.cuh"
#include "kernels/common/swizzle.cuh"
#include "kernels/sm90/load_slices.cuh"

namespace preflash::sm90 {

// Lane layout of a warp that rotates rows of a tile or slice of K.
template <class Traits>
struct RotaryLanes {
  static constexpr int kPerRow =
      std::min(Traits::kHeadQk, Traits::kSliceColumns) / (2 * kLanePairs);
  static constexpr int kRowsAtOnce = 32 / kPerRow;
};

// Fills the tables with all threads of the CTA; readers must wait for the CTA first.
template <class Traits>
CUTE_DEVICE void fill_rotary_tables(const RotaryFrequencies& frequencies,
                                    SharedStorage<Traits>& smem) {
  for (int pair = threadIdx.x; pair < Traits::kPairs; pair += Traits::kThreads) {
    std::uint64_t frequency = frequencies.of_pair[pair];
    smem.rotary().frequency[pair] = frequency;
    smem.rotary().row_step[pair] =
        rotation_by(turns_at(RotaryLanes<Traits>::kRowsAtOnce, frequency));
  }
}

// Rotates a warp's rows of a raw tile of K, which becomes the tile: element by element both have
// the same place, but for the bytes of an element. first_key: of the tile. A lane's angles at its
// first row come from the position. Calls read() when nothing is to be read any more.
template <class Traits, DType kFrom>
CUTE_DEVICE void rotate_rows(SharedStorage<Traits>& smem, int first_key, int head_dim,
                             unsigned char* raw, unsigned char* tile, const auto& read) {
  using Lanes = RotaryLanes<Traits>;
  using Stored = FourStored<kFrom>;
  constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;
  constexpr int kBatch = 4;  // rows of a lane in flight
  constexpr int kBatchRows = kBatch * Lanes::kRowsAtOnce;
  static_assert(kBatchRows % 8 == 0 && kWarpKeys % kBatchRows == 0);
  const int unit = lane_id() % Lanes::kPerRow;
  const int row = threadIdx.x / 32 % kWarpgroupWarps * kWarpKeys + lane_id() / Lanes::kPerRow;
  const PairColumns columns = PairColumns::of(unit, head_dim);
  auto source = [&](int column) {
    return SwizzledColumn<Traits::kTileN>(raw, row, column * size_of(kFrom) / 2);
  };
  auto target = [&](int column) { return SwizzledColumn<Traits::kTileN>(tile, row, column); };
  SwizzledColumn low_source = source(columns.low), high_source = source(columns.high);
  SwizzledColumn low_target = target(columns.low), high_target = target(columns.high);
  SteppedAngles angles(LaneAngles::at<fast_rotation_by>(
                           first_key + row, smem.rotary().frequency + unit * kLanePairs),
                       smem.rotary().row_step + unit * kLanePairs);
#pragma unroll 1
  for (int first = 0; first < kWarpKeys; first += kBatchRows) {
    Stored low[kBatch], high[kBatch];
    CUTE_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      low[i] = *reinterpret_cast<const Stored*>(low_source.at(i * Lanes::kRowsAtOnce));
      high[i] = *reinterpret_cast<const Stored*>(high_source.at(i * Lanes::kRowsAtOnce));
    }
    if (first + kBatchRows == kWarpKeys) read();
    CUTE_UNROLL
    for (int i = 0; i < kBatch; ++i) {
      FourFloats low_floats = FourFloats::of<kFrom>(low[i]);
      FourFloats high_floats = FourFloats::of<kFrom>(high[i]);
      angles.now.rotate(low_floats, high_floats);
      low_floats.store<Traits::kVariant.kv_dtype>(low_target.at(i * Lanes::kRowsAtOnce));
      high_floats.store<Traits::kVariant.kv_dtype>(high_target.at(i * Lanes::kRowsAtOnce));
      angles.advance();
    }
    for (auto* column : {&low_source, &high_source, &low_target, &high_target}) {
      column->block += kBatchRows * kBlockRowBytes;
    }
  }
}

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
  static constexpr int kBlocks = sizeof(Element) == 1 ? 1 : Traits::kBlocksQk;
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
  CUTE_DEVICE static void drain() {}

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
  CUTE_DEVICE static void drain() {}
  CUTE_DEVICE const HopperSegment& segment() const { return params; }
  CUTE_DEVICE static Tile find(const ItemKeys&, int) { return {}; }

  template <Operand kOperand>
  CUTE_DEVICE void copy(Tile, int, int, int num_slices) {
#pragma unroll 1
    for (int slice = 0; slice < num_slices; ++slice) slices.dequantize(params.kv_dtype);
  }
};

// Slices of K and V under RoPE, converted in registers. A slice of K holds both columns of 64
// pairs, so that it is rotated by itself: 64 columns of the first half of head_dim, and those that
// they are paired with. Q has that order, too (load_query.cuh).
template <class Traits>
struct ConvertedSlices : SliceRows<Traits, SliceWriter<Traits>, Traits::kProducerWarps> {
  using Base = SliceRows<Traits, SliceWriter<Traits>, Traits::kProducerWarps>;
  using Base::Base;
  using typename Base::Tile;
  static constexpr DType kTo = Traits::kVariant.kv_dtype;

 protected:
  template <Operand kOperand>
  CUTE_DEVICE void copy(const Tile& tile, int part, int column, int num_slices) {
    auto convert = [&](auto from) {
      const auto rows = this->rows_of_part(tile.rows, part);
#pragma unroll 1
      for (int slice = 0; slice < num_slices; ++slice) {
        convert_slice<kOperand, from>(tile.item, rows, column, slice);
      }
    };
    this->item = tile.item;
    if (dequantizes<Traits>(this->segment())) {
      dispatch_8_bits(this->segment().kv_dtype, convert);
    } else if constexpr (kOperand == Operand::kK) {
      convert(C<kTo>{});
    } else {
      Base::template copy<kOperand>(tile, part, column, num_slices);
    }
  }

 private:
  // Half of the lanes share a row: a lane takes four neighbouring columns of either half of the
  // slice. first_column: of V.
  template <Operand kOperand, DType kFrom>
  CUTE_DEVICE void convert_slice(const ItemKeys& item, const auto& rows, int first_column,
                                 int slice) {
    using Source = SourceOf<kOperand>;
    using Stored = FourStored<kFrom>;
    using Lanes = RotaryLanes<Traits>;
    constexpr bool kRotates = kOperand == Operand::kK;
    constexpr int kBytes = size_of(kFrom);
    constexpr int kHalf = Traits::kSliceColumns / 2;
    constexpr int kPasses = Base::kWarpKeys / Lanes::kRowsAtOnce;
    const HopperSegment& segment = this->segment();
    const int own = lane_id() % Lanes::kPerRow * kLanePairs;
    const int low_column = kRotates ? slice * kHalf + own : first_column + slice * 2 * kHalf + own;
    const int to_high = kRotates ? segment.head_dim_qk / 2 : kHalf;
    const bool has_low = low_column < (kRotates ? to_high : segment.head_dim_vo);
    const bool has_high = kRotates ? has_low : low_column + kHalf < segment.head_dim_vo;
    const KvTensor& tensor = Source::tensor(segment);
    const std::int64_t slot_of_lane =
        item.kv_head * tensor.stride_head + slot_offset(tensor, rows.slot[0]);
    const int lane_row = lane_id() / Lanes::kPerRow;
    const int first_key = rows.tile * Traits::kTileN + this->warp_row();
    Stored low[kPasses], high[kPasses];
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      const int row = i * Lanes::kRowsAtOnce + lane_row;
      const std::int64_t offset = __shfl_sync(0xffffffffu, slot_of_lane, row) + low_column;
      const auto* four = reinterpret_cast<const Stored*>(
          static_cast<const unsigned char*>(tensor.data) + offset * kBytes);
      const bool exists = first_key + row >= item.keys.begin && first_key + row < item.keys.end;
      low[i] = exists && has_low ? __ldg(four) : Stored{};
      high[i] = exists && has_high ? __ldg(four + to_high / kLanePairs) : Stored{};
    }
    Base::drain();  // V before, while these rows are on their way
    auto& tables = this->write.smem.rotary();
    const int pair = kRotates && has_low ? low_column : 0;
    SteppedAngles angles(
        LaneAngles::at<fast_rotation_by>(first_key + lane_row, tables.frequency + pair),
        tables.row_step + pair);
    this->write.wait();
    order_memory_accesses();
    auto target = [&](int column) {
      return SwizzledColumn<Traits::kTileN>(this->write.bytes(), this->warp_row() + lane_row,
                                            column);
    };
    const SwizzledColumn low_target = target(own), high_target = target(kHalf + own);
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      FourFloats low_floats = FourFloats::of<kFrom>(low[i]);
      FourFloats high_floats = FourFloats::of<kFrom>(high[i]);
      if (kRotates) angles.now.rotate(low_floats, high_floats);
      low_floats.store<kTo>(low_target.at(i * Lanes::kRowsAtOnce));
      high_floats.store<kTo>(high_target.at(i * Lanes::kRowsAtOnce));
      angles.advance();
    }
    publish_rows(this->write);
  }
};

}  // namespace preflash::sm90
