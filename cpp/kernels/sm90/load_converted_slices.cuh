// Slices of K and V that are converted on load: 8 bits are dequantised as in load_widened.cuh, keys
// to rotate go through registers, V of 16 bits goes to the ring at once.
#pragma once

#include "kernels/sm90/forward_convert.cuh"
#include "kernels/sm90/load_slices.cuh"
#include "kernels/sm90/load_widened.cuh"

namespace preflash::sm90 {

// A slice of 8 bits is in flight while the one before it is
// written, as in SliceRows; others follow each other.
template <class Traits>
struct ConvertedSlices : SliceRows<Traits> {
  using Base = SliceRows<Traits>;
  using typename Base::Tile;
  using Narrow = WideningRows<Traits, Traits::kSliceColumns>;
  static constexpr DType kTo = Traits::kVariant.kv_dtype;
  static constexpr int kWarpKeys = Base::kWarpKeys;

  Narrow narrow;
  bool in_flight = false;

  CUTE_DEVICE ConvertedSlices(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : Base(params, smem), narrow(smem.raw) {}

 protected:
  CUTE_DEVICE void finish() {
    write_narrow([](auto) { cp_async_fence(); });
  }

  template <Operand kOperand>
  CUTE_DEVICE void copy(const Tile& tile, int column, int num_slices) {
    using Writer = TileWriter<Traits, kOperand>;
    this->item = tile.item;
    const HopperSegment& segment = this->segment();
    const bool is_narrow = Traits::kWidens && size_of(segment.kv_dtype) == 1;
    const bool rotates =
        kOperand == Operand::kK && (!is_narrow || segment.position == Position::kRope);
    if (is_narrow && !rotates) {
      typename Narrow::Source from{Writer::tensor(segment),
                                   Writer::head_dim(segment),
                                   column,
                                   this->item,
                                   tile.rows.slot[0],
                                   tile.index};
#pragma unroll 1
      for (int slice = 0; slice < num_slices; ++slice, from.column += Traits::kSliceColumns) {
        auto copy = [&](auto part) { narrow.template copy<part>(from); };
        if (in_flight) {
          write_narrow(copy);
        } else {
          copy(Int<0>{});
          copy(Int<1>{});
        }
        in_flight = true;
      }
      return;
    }
    finish();
    if constexpr (kOperand == Operand::kK) {
#pragma unroll 1
      for (int slice = 0; slice < num_slices; ++slice, column += Traits::kSliceColumns) {
        if (is_narrow) {
          dispatch_8_bits(segment.kv_dtype, [&](auto from) { rotate<from>(tile, column); });
        } else {
          rotate<kTo>(tile, column);
        }
      }
    } else {
      copy_wide(tile, column);
    }
  }

 private:
  // Writes the slice that is in flight, and requests the next one.
  CUTE_DEVICE void write_narrow(const auto& copy_next) {
    if (!in_flight) return;
    in_flight = false;
    this->write.wait();
    narrow.template write<0>(this->segment().kv_dtype, this->write.bytes(), copy_next);
    narrow.template write<1>(this->segment().kv_dtype, this->write.bytes(), copy_next);
    publish_rows(this->write);
  }

  // V of 16 bits: all slices at once.
  CUTE_DEVICE void copy_wide(const Tile& tile, int column) {
    const HopperSegment& segment = this->segment();
    KvTensor columns = segment.v;
    auto first = this->write.next;
    CUTE_UNROLL
    for (int slice = 0; slice < Traits::kSlicesV; ++slice, column += Traits::kSliceColumns) {
      columns.data = static_cast<const typename Base::Element*>(segment.v.data) + column;
      this->write.wait();
      Base::template fetch<Base::kBlocks>(tile.rows, tile.index, columns,
                                          segment.head_dim_vo - column, this->write.slice());
      this->write.next.advance();
    }
    cp_async_fence();
    cp_async_wait<0>();
    this->write.next = first;
    CUTE_UNROLL
    for (int slice = 0; slice < Traits::kSlicesV; ++slice) publish_rows(this->write);
  }

  // A slice of K. A lane takes four neighbouring columns of every row of the warp, and the columns
  // half a head_dim away, because slices are written one by one.
  template <DType kFrom>
  CUTE_DEVICE void rotate(const Tile& tile, int column) {
    using Stored = FourStored<kFrom>;
    constexpr int kBytes = size_of(kFrom);
    constexpr int kSpan = 8;  // rows until angles are exact again
    const HopperSegment& segment = this->segment();
    const int half = segment.head_dim_qk / 2;
    const int lane_column = lane_id() * kLanePairs;
    const int own_column = column + lane_column;
    const bool is_high = own_column >= half;
    const bool exists = own_column < 2 * half;
    const int pair = !exists ? 0 : is_high ? own_column - half : own_column;
    const int to_other = is_high ? -half : half;
    const KvTensor& k = segment.k;
    const std::int64_t lane_row =
        tile.item.kv_head * k.stride_head + slot_offset(k, tile.rows.slot[0]) + column;
    const int first_key = tile.index * Traits::kTileN + this->warp_row();
    const auto& smem = this->write.smem;
    this->write.wait();
    unsigned char* slice = this->write.bytes();
#pragma unroll 1
    for (int span = 0; span < kWarpKeys; span += kSpan) {
      Stored own[kSpan], other[kSpan];
      CUTE_UNROLL
      for (int i = 0; i < kSpan; ++i) {
        const unsigned char* row = static_cast<const unsigned char*>(k.data) +
                                   __shfl_sync(0xffffffffu, lane_row, span + i) * kBytes;
        const int key = first_key + span + i;
        own[i] = other[i] = Stored{};
        if (exists && key >= tile.item.keys.begin && key < tile.item.keys.end) {
          own[i] = __ldg(reinterpret_cast<const Stored*>(row + lane_column * kBytes));
          other[i] =
              __ldg(reinterpret_cast<const Stored*>(row + (lane_column + to_other) * kBytes));
        }
      }
      SteppedAngles angles(
          LaneAngles::at<fast_rotation_by>(first_key + span, smem.frequency + pair),
          smem.row_step + pair);
      if (is_high) angles.reverse();
      CUTE_UNROLL
      for (int i = 0; i < kSpan; ++i) {
        FourFloats turned = FourFloats::of<kFrom>(own[i]);
        FourFloats beside = FourFloats::of<kFrom>(other[i]);
        angles.now.rotate(turned, beside);
        const int row = this->warp_row() + span + i;
        turned.template store<kTo>(slice + swizzled<Traits::kTileN>(row, lane_column));
        if (i + 1 < kSpan) angles.advance();
      }
    }
    publish_rows(this->write);
  }
};

}  // namespace preflash::sm90
