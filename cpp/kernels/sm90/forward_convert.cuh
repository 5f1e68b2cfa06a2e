// Converts operands on load: 8 bits are dequantised exactly to 16, and rows of Q and K are rotated
// (RoPE). A lane takes four pairs of dimensions (lane_angles.cuh), aligned whatever the head_dim.
#pragma once

#include "kernels/common/lane_angles.cuh"
#include "kernels/common/swizzle.cuh"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

namespace preflash::sm90 {

// How the lanes of a warp share the rows of K that they rotate.
template <class Traits>
struct RotaryLanes {
  static constexpr int kUnits = Traits::kPairs / kLanePairs;  // of one row
  static constexpr int kPerRow = std::min(32, kUnits & -kUnits);
  static constexpr int kTurns = kUnits / kPerRow;  // of a lane, for one row
  static constexpr int kRowsAtOnce = 32 / kPerRow;
};

// All threads of the CTA write the tables; whoever reads them waits for the CTA first.
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

// One warp's rows of a tile of K or V, from the raw ring to the tile. As the compiler moves no load
// before an earlier store, a method reads as much as it can hold before it writes.
template <class Traits>
struct RowConversion {
  static constexpr DType kTo = Traits::kVariant.kv_dtype;
  static constexpr int kWarpKeys = Traits::kTileN / Traits::kProducerWarps;

  const unsigned char* raw;  // [tile n, compiled head_dim] as stored
  int first_row;             // of the warp

  // A lane's share of rows of 8 bits: 8 neighbouring elements a unit, 8 lanes a block of columns.
  static constexpr int kUnitRows = 4;
  static constexpr int kPasses = kWarpKeys / kUnitRows;
  static_assert(kWarpKeys % kUnitRows == 0);
  template <int kHead>
  using Units = uint2[kPasses][kHead / 64];

  template <int kHead>
  CUTE_DEVICE void read(Units<kHead>& units) const {
    const unsigned char* lane = raw + (first_row + lane_id() / 8) * kHead + lane_id() % 8 * 8;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      CUTE_UNROLL
      for (int block = 0; block < kHead / 64; ++block) {
        units[pass][block] =
            *reinterpret_cast<const uint2*>(lane + pass * kUnitRows * kHead + block * 64);
      }
    }
  }
  template <DType kFrom, int kHead>
  CUTE_DEVICE void write(const Units<kHead>& units, unsigned char* tile) const {
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int row = first_row + pass * kUnitRows + lane_id() / 8;
      unsigned char* target = tile + swizzled<Traits::kTileN>(row, lane_id() % 8 * 8);
      CUTE_UNROLL
      for (int block = 0; block < kHead / 64; ++block) {
        *reinterpret_cast<uint4*>(target + block * Traits::kTileN * kBlockRowBytes) =
            widen<kFrom, kTo>(units[pass][block]);
      }
    }
  }

  // first_key: of the tile. A lane's angles at its first row come from the position.
  template <DType kFrom>
  CUTE_DEVICE void rotate(SharedStorage<Traits>& smem, int first_key, int head_dim,
                          unsigned char* tile) const {
    using Lanes = RotaryLanes<Traits>;
    constexpr int kPasses = kWarpKeys / Lanes::kRowsAtOnce;
    constexpr int kBatch = kPasses % 4 == 0 ? 4 : 3;  // rows of a lane in flight
    constexpr int kRowBytes = Traits::kHeadQk * size_of(kFrom);
    static_assert(kWarpKeys % Lanes::kRowsAtOnce == 0 && kPasses % kBatch == 0);
    static_assert(kWarpKeys % 8 == 0 || (kWarpKeys % 4 == 0 && Lanes::kRowsAtOnce == 1));
    using Stored = FourStored<kFrom>;
    int lane_row = first_row + lane_id() / Lanes::kPerRow;
#pragma unroll 1
    for (int turn = 0; turn < Lanes::kTurns; ++turn) {
      int unit = turn * Lanes::kPerRow + lane_id() % Lanes::kPerRow;
      PairColumns columns = PairColumns::of(unit, head_dim);
      const unsigned char* source = raw + lane_row * kRowBytes;
      const unsigned char* low_source = source + columns.low * size_of(kFrom);
      const unsigned char* high_source = source + columns.high * size_of(kFrom);
      SwizzledColumn<Traits::kTileN> low_target(tile, lane_row, columns.low);
      SwizzledColumn<Traits::kTileN> high_target(tile, lane_row, columns.high);
      SteppedAngles angles(LaneAngles::at<fast_rotation_by>(
                               first_key + lane_row, smem.rotary().frequency + unit * kLanePairs),
                           smem.rotary().row_step + unit * kLanePairs);
      CUTE_UNROLL
      for (int batch = 0; batch < kPasses; batch += kBatch) {
        Stored low[kBatch], high[kBatch];
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          int offset = (batch + i) * Lanes::kRowsAtOnce;
          low[i] = *reinterpret_cast<const Stored*>(low_source + offset * kRowBytes);
          high[i] = *reinterpret_cast<const Stored*>(high_source + offset * kRowBytes);
        }
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          int offset = (batch + i) * Lanes::kRowsAtOnce;
          FourFloats low_floats = FourFloats::of<kFrom>(low[i]);
          FourFloats high_floats = FourFloats::of<kFrom>(high[i]);
          angles.now.rotate(low_floats, high_floats);
          low_floats.store<kTo>(low_target.at(offset));
          high_floats.store<kTo>(high_target.at(offset));
          if (batch + i + 1 < kPasses) angles.advance();
        }
      }
    }
  }
};

}  // namespace preflash::sm90
