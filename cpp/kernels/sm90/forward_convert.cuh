// Converts operands on load: 8 bits are dequantised exactly to 16, and rows of Q and K are rotated
// (RoPE). A lane takes four pairs of dimensions (lane_angles.cuh), aligned whatever the head_dim.
#pragma once

#include "kernels/common/lane_angles.cuh"
#include "kernels/common/swizzle.cuh"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

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

}  // namespace preflash::sm90
