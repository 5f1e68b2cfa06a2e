// Slices of K and V under RoPE: keys are rotated, and V of 8 bits is dequantised, on their way
// through registers; V of 16 bits goes to the ring at once.
//
// A slice of K holds both columns of 64 pairs, so that it is rotated by itself: 64 columns of the
// first half of head_dim, and those that they are paired with. Q has that order, too
// (load_query.cuh).
#pragma once

#include "kernels/sm90/forward_convert.cuh"
#include "kernels/sm90/load_slices.cuh"

namespace preflash::sm90 {

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
    unsigned char* target = this->write.bytes();
    CUTE_UNROLL
    for (int i = 0; i < kPasses; ++i) {
      FourFloats low_floats = FourFloats::of<kFrom>(low[i]);
      FourFloats high_floats = FourFloats::of<kFrom>(high[i]);
      if (kRotates) angles.now.rotate(low_floats, high_floats);
      const int row = this->warp_row() + i * Lanes::kRowsAtOnce + lane_row;
      low_floats.store<kTo>(target + swizzled<Traits::kTileN>(row, own));
      high_floats.store<kTo>(target + swizzled<Traits::kTileN>(row, kHalf + own));
      angles.advance();
    }
    publish_rows(this->write);
  }
};

}  // namespace preflash::sm90
