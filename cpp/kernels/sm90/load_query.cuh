// How the 64 rows of an item's Q, which a producer loads as they are stored (load_tma.cuh), become
// the operand of a consumer warpgroup: policies, of which QueryOf is the variant's. After arrive()
// the products may read them.
#pragma once

#include <bit>

#include "kernels/sm90/forward_convert.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ArrivingQuery {
  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  const ItemState& state;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup

  CUTE_DEVICE void arrive(const auto& q_read) const {
    await(q_read);
    multiply(params.logits.q_factor, q_read.index());
  }

 protected:
  CUTE_DEVICE void await(const auto& q_read) const {
    smem.barriers.q_full[q_read.index()].wait(q_read.phase());
    order_memory_accesses();
  }
  // The warpgroup has written its rows.
  CUTE_DEVICE void publish() const {
    order_memory_accesses();
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }

 private:
  // sm_scale <= 0 is applied through Q's sign (LogitsParams).
  CUTE_DEVICE void multiply(const float& factor, int stage) const {
    if (factor == 1.0f) return;
    using Element = typename Traits::ElementQ;
    Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{});
    for (int i = thread; i < kWarpgroupRows * Traits::kHeadQk; i += kWarpgroupThreads) {
      Element& q = sQ(warpgroup * kWarpgroupRows + i / Traits::kHeadQk, i % Traits::kHeadQk, stage);
      q = static_cast<Element>(static_cast<float>(q) * factor);
    }
    publish();
  }
};

// The warpgroup dequantises and rotates the rows where they lie. A row of 8 bits lies in the first
// blocks of the row that it becomes, and one warp reads all of it before it writes any.
template <class Traits>
struct ConvertedQuery : ArrivingQuery<Traits> {
  using Base = ArrivingQuery<Traits>;
  using Base::params;
  using Base::smem;

  static constexpr DType kTo = Traits::kVariant.q_dtype;
  static constexpr int kUnits = Traits::kPairs / kLanePairs;  // of one row
  static constexpr int kLanes = std::min(32, static_cast<int>(std::bit_ceil(unsigned{kUnits})));
  static constexpr int kTurns = ceil_div(kUnits, kLanes);  // units of a lane, in one row
  static constexpr int kRowsAtOnce = kWarpgroupThreads / kLanes;
  static constexpr int kBatch = std::min(8 / kTurns, kWarpgroupRows / kRowsAtOnce);  // of a lane
  static_assert(Traits::kQStages == 1 && kWarpgroupRows % (kRowsAtOnce * kBatch) == 0);

  CUTE_DEVICE void arrive(const auto& q_read) const {
    this->await(q_read);
    if (Traits::kWidens && params.q_dtype == DType::kFloat8E4M3) {
      convert<DType::kFloat8E4M3>();
    } else if (Traits::narrows_query(params.q_dtype)) {
      convert<DType::kBFloat16>();
    } else if (rotates() || params.logits.q_factor != 1.0f) {
      convert<kTo>();
    } else {
      return;
    }
    this->publish();
  }

 private:
  // Four pairs of dimensions: of RoPE, those of half a head_dim apart.
  template <class Four>
  struct Unit {
    Four low;
    Four high;
  };

  CUTE_DEVICE bool rotates() const { return params.position == Position::kRope; }

  template <DType kFrom>
  CUTE_DEVICE void convert() const {
    using Stored = FourStored<kFrom>;
    auto* q = reinterpret_cast<unsigned char*>(smem.q);
    const int lane = this->thread % kLanes;
#pragma unroll 1
    for (int first = this->thread / kLanes; first < kWarpgroupRows; first += kRowsAtOnce * kBatch) {
      const int first_row = this->warpgroup * kWarpgroupRows + first;
      // Of a row's columns in 16-bit elements, as they are stored or to be.
      auto place = [&](int column) {
        return SwizzledColumn<Traits::kTileM>(q, first_row, column);
      };
      Unit<Stored> stored[kBatch][kTurns];
      for_each_unit(lane, [&](int turn, int, const PairColumns& columns) {
        const auto low = place(columns.low * size_of(kFrom) / 2);
        const auto high = place(columns.high * size_of(kFrom) / 2);
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          stored[i][turn] = {*reinterpret_cast<const Stored*>(low.at(i * kRowsAtOnce)),
                             *reinterpret_cast<const Stored*>(high.at(i * kRowsAtOnce))};
        }
      });
      __syncwarp();
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int row = first_row + i * kRowsAtOnce;
        Unit<FourFloats> units[kTurns];
        const float factor = prepare<kFrom>(stored[i], row, lane, units);
        for_each_unit(lane, [&](int turn, int, const PairColumns& columns) {
          units[turn].low.multiply(factor);
          units[turn].high.multiply(factor);
          units[turn].low.template store<kTo>(place(columns.low).at(i * kRowsAtOnce));
          units[turn].high.template store<kTo>(place(columns.high).at(i * kRowsAtOnce));
        });
      }
    }
  }
  // The units that a lane has of a row.
  CUTE_DEVICE void for_each_unit(int lane, const auto& visit) const {
    CUTE_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int unit = lane + turn * kLanes;
      if (unit < kUnits) visit(turn, unit, PairColumns::of(unit, params.head_dim_qk));
    }
  }
  // Returns what the row is to be multiplied by, and leaves its inverse for the scores.
  template <DType kFrom>
  CUTE_DEVICE float prepare(const Unit<FourStored<kFrom>> (&stored)[kTurns], int row, int lane,
                            Unit<FourFloats> (&units)[kTurns]) const {
    float maximum = 0.0f;
    for_each_unit(lane, [&](int turn, int unit, const PairColumns&) {
      FourFloats low = FourFloats::of<kFrom>(stored[turn].low);
      FourFloats high = FourFloats::of<kFrom>(stored[turn].high);
      if (rotates()) angles_of(row, unit).rotate(low, high);
      maximum = fmaxf(maximum, fmaxf(low.maximum(), high.maximum()));
      units[turn] = {low, high};
    });
    // sm_scale <= 0 is applied through Q's sign (LogitsParams).
    if constexpr (kFrom == DType::kBFloat16 && kTo == DType::kFloat16) {
      CUTE_UNROLL
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, lanes));
      }
      const float factor = narrowing_factor(maximum);
      if (lane == 0) smem.query_scale[row] = 1.0f / factor;
      return factor * params.logits.q_factor;
    } else {
      return params.logits.q_factor;
    }
  }
  CUTE_DEVICE LaneAngles angles_of(int row, int unit) const {
    const ItemState& state = this->state;
    int token = unpack_row(params, state.item.row_begin + row).token;
    int position = state.request.kv_len - state.request.qo_len + token;
    return LaneAngles::at<fast_rotation_by>(position,
                                            smem.rotary().frequency + unit * kLanePairs);
  }
};

template <class Traits>
using QueryOf =
    conditional_t<Traits::kConverts, ConvertedQuery<Traits>, ArrivingQuery<Traits>>;

}  // namespace preflash::sm90
