// Slices of K and V under RoPE: keys are rotated, and V of 8 bits is dequantised, on their way
// through registers; V of 16 bits goes to the ring at once.
#pragma once

#include "kernels/sm90/forward_convert.cuh"
#include "kernels/sm90/load_slices.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ConvertedSlices : SliceRows<Traits> {
  using Base = SliceRows<Traits>;
  using Base::Base;
  using typename Base::Tile;
  static constexpr DType kTo = Traits::kVariant.kv_dtype;
  static constexpr int kWarpKeys = Base::kWarpKeys;

 protected:
  template <Operand kOperand>
  CUTE_DEVICE void copy(const Tile& tile, int part, int column, int num_slices) {
    this->item = tile.item;
    const auto rows = this->rows_of_part(tile.rows, part);
    auto convert = [&](auto from) {
#pragma unroll 1
      for (int slice = 0; slice < num_slices; ++slice, column += Traits::kSliceColumns) {
        convert_slice<kOperand, from>(tile.item, rows, column);
      }
    };
    if (Traits::kWidens && size_of(this->segment().kv_dtype) == 1) {
      dispatch_8_bits(this->segment().kv_dtype, convert);
    } else if constexpr (kOperand == Operand::kK) {
      convert(C<kTo>{});
    } else {
      Base::template copy<kOperand>(tile, part, column, num_slices);
      Base::drain();
    }
  }

 private:
  // A lane takes four neighbouring columns of every row of the warp, and, of K, the columns half a
  // head_dim away, because slices are written one by one.
  template <Operand kOperand, DType kFrom>
  CUTE_DEVICE void convert_slice(const ItemKeys& item, const auto& rows, int column) {
    using Source = SourceOf<kOperand>;
    using Stored = FourStored<kFrom>;
    constexpr bool kRotates = kOperand == Operand::kK;
    constexpr int kBytes = size_of(kFrom);
    constexpr int kSpan = 8;  // rows until angles are exact again
    const HopperSegment& segment = this->segment();
    const int half = segment.head_dim_qk / 2;
    const int lane_column = lane_id() * kLanePairs;
    const int own_column = column + lane_column;
    const bool is_high = own_column >= half;
    const bool exists = own_column < Source::head_dim(segment);
    const int pair = !exists ? 0 : is_high ? own_column - half : own_column;
    const int to_other = is_high ? -half : half;
    const KvTensor& tensor = Source::tensor(segment);
    const std::int64_t lane_row =
        item.kv_head * tensor.stride_head + slot_offset(tensor, rows.slot[0]) + column;
    const int first_key = rows.tile * Traits::kTileN + this->warp_row();
    auto& tables = this->write.smem.rotary();
    this->write.wait();
    unsigned char* slice = this->write.bytes();
#pragma unroll 1
    for (int span = 0; span < kWarpKeys; span += kSpan) {
      Stored own[kSpan], other[kSpan];
      CUTE_UNROLL
      for (int i = 0; i < kSpan; ++i) {
        const unsigned char* row = static_cast<const unsigned char*>(tensor.data) +
                                   __shfl_sync(0xffffffffu, lane_row, span + i) * kBytes +
                                   lane_column * kBytes;
        const int key = first_key + span + i;
        own[i] = other[i] = Stored{};
        if (exists && key >= item.keys.begin && key < item.keys.end) {
          own[i] = __ldg(reinterpret_cast<const Stored*>(row));
          if (kRotates) other[i] = __ldg(reinterpret_cast<const Stored*>(row + to_other * kBytes));
        }
      }
      SteppedAngles angles(
          LaneAngles::at<fast_rotation_by>(first_key + span, tables.frequency + pair),
          tables.row_step + pair);
      if (is_high) angles.reverse();
      CUTE_UNROLL
      for (int i = 0; i < kSpan; ++i) {
        FourFloats four = FourFloats::of<kFrom>(own[i]);
        FourFloats beside = FourFloats::of<kFrom>(other[i]);
        if (kRotates) angles.now.rotate(four, beside);
        const int row = this->warp_row() + span + i;
        four.template store<kTo>(slice + swizzled<Traits::kTileN>(row, lane_column));
        if (i + 1 < kSpan) angles.advance();
      }
    }
    publish_rows(this->write);
  }
};

}  // namespace preflash::sm90
