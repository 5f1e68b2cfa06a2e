// Conversion of an item's Q, which a producer loads as stored (load_tma.cuh), to the operand of the
// consumer warpgroups. Policies, of which QueryOf is the variant's, have 64 rows each: after
// arrive() the products may read them. QueryQuantizer is run by a producer warpgroup.
#pragma once

#include "kernels/common/lane_angles.cuh"
#include "kernels/common/swizzle.cuh"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ArrivingQuery {
  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  const ItemState& state;
  const ConsumerPipelineState<Traits::kQStages>& read;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup

  CUTE_DEVICE void arrive() const {
    await();
    multiply(params.logits.q_factor);
  }
  // The factor of the scores of a thread's row r.
  CUTE_DEVICE static float scale(const auto&, int) { return 1.0f; }

 protected:
  CUTE_DEVICE void await() const {
    smem.barriers.q.full[read.index()].wait(read.phase());
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
  CUTE_DEVICE void multiply(const float& factor) const {
    if (factor == 1.0f) return;
    using Element = typename Traits::ElementQ;
    Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{});
    for (int i = thread; i < kWarpgroupRows * Traits::kHeadQk; i += kWarpgroupThreads) {
      Element& q =
          sQ(warpgroup * kWarpgroupRows + i / Traits::kHeadQk, i % Traits::kHeadQk, read.index());
      q = static_cast<Element>(static_cast<float>(q) * factor);
    }
    publish();
  }
};

// Rows that a producer has quantised.
template <class Traits>
struct QuantizedQuery : ArrivingQuery<Traits> {
  CUTE_DEVICE float scale(const auto& of_item, int r) const {
    return this->smem.raw_q.factors[this->read.index()][of_item.row(r)];
  }
};

// Makes e4m3 of an item's Q of 16 bits. Each row is multiplied by a power of two, and its scores by
// the inverse: e4m3 keeps four bits of each element above 2^-15 of the row's largest.
template <class Traits>
struct QueryQuantizer {
  static constexpr int kLanes = 8;  // to a row; each has eight columns of either half
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static constexpr int kRowsOfWarp = Traits::kTileM / kWarpgroupWarps;
  static_assert(!Traits::kQuantizesQ || Traits::kHeadQk == 2 * kLanes * 8);

  SharedStorage<Traits>& smem;
  DType stored;
  ProducerPipelineState<Traits::kQStages> next = {};

  CUTE_DEVICE void quantize(int num_rows) {
    const ProducerPipelineState<1> raw{next.count};
    smem.raw_q.ring.full[0].wait(raw.phase());
    smem.barriers.q.empty[next.index()].wait(next.phase() ^ 1);
    order_memory_accesses();
    if (stored == DType::kFloat16) {
      quantize_from<DType::kFloat16>(num_rows);
    } else {
      quantize_from<DType::kBFloat16>(num_rows);
    }
    order_memory_accesses();
    publish_writes(smem.barriers.q.full[next.index()]);
    release(smem.raw_q.ring.empty[0]);
    next.advance();
  }

 private:
  template <DType kFrom>
  CUTE_DEVICE void quantize_from(int num_rows) const {
    auto* from = reinterpret_cast<unsigned char*>(smem.raw_q.rows);
    auto* to = reinterpret_cast<unsigned char*>(smem.q) + next.index() * Traits::kBytesQ;
    const int lane = lane_id() % kLanes;
    const int first = threadIdx.x % kWarpgroupThreads / 32 * kRowsOfWarp;
#pragma unroll 1
    for (int pass = first; pass < min(first + kRowsOfWarp, num_rows); pass += kRowsAtOnce) {
      const int row = pass + lane_id() / kLanes;
      FourFloats four[2][2];  // of each half
      float maximum = 0.0f;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        const auto* eight = reinterpret_cast<const uint4*>(
            from + swizzled<Traits::kTileM>(row, half * 64 + lane * 8));
        four[half][0] = FourFloats::of<kFrom>(uint2{eight->x, eight->y});
        four[half][1] = FourFloats::of<kFrom>(uint2{eight->z, eight->w});
        maximum = fmaxf(maximum, fmaxf(four[half][0].maximum(), four[half][1].maximum()));
      }
      CUTE_UNROLL
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, lanes));
      }
      const float factor = e4m3_factor(maximum);
      if (lane == 0) smem.raw_q.factors[next.index()][row] = inverse_power(factor);
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        for (FourFloats& x : four[half]) x.multiply(factor);
        // In units of 16 bits, a row of e4m3 is one of half as many columns.
        *reinterpret_cast<uint2*>(to + swizzled<Traits::kTileM>(row, half * 32 + lane * 4)) =
            uint2{four[half][0].e4m3(), four[half][1].e4m3()};
      }
    }
  }
};

// Each warp dequantises and rotates its rows where they lie. A row of 8 bits lies in the first
// blocks of the row that it becomes, and is read as a whole before any of it is written. Rows of no
// token become zeros: what the item before left there would be converted again.
template <class Traits>
struct ConvertedQuery : ArrivingQuery<Traits> {
  using Base = ArrivingQuery<Traits>;
  using Base::params;
  using Base::smem;

  static constexpr DType kTo = Traits::kVariant.q_dtype;
  static constexpr int kUnits = Traits::kPairs / kLanePairs;     // of one row
  static constexpr int kLanes = std::min(32, kUnits & -kUnits);  // for one row
  static constexpr int kTurns = kUnits / kLanes;
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static constexpr int kBatch = std::min(8 / kTurns, kWarpRows / kRowsAtOnce);  // rows of a lane
  static_assert(Traits::kQStages == 1 && kWarpRows % (kRowsAtOnce * kBatch) == 0);

  CUTE_DEVICE void arrive() const {
    this->await();
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
  CUTE_DEVICE float scale(const auto& of_item, int r) const {
    if (!Traits::narrows_query(params.q_dtype)) return 1.0f;
    return conversion_of(smem).query_scale[of_item.row(r)];
  }

 private:
  // Four pairs of dimensions; with RoPE, of dimensions half a head_dim apart.
  template <class Four>
  struct Unit {
    Four low;
    Four high;
  };

  CUTE_DEVICE bool rotates() const { return params.position == Position::kRope; }

  template <DType kFrom>
  CUTE_DEVICE void convert() const {
    if (rotates()) {
      convert<kFrom, true>();
    } else {
      convert<kFrom, false>();
    }
  }
  // The rows of a group are independent: one alone would wait for each step of its own.
  template <DType kFrom, bool kRotates>
  CUTE_DEVICE void convert() const {
    using Stored = FourStored<kFrom>;
    constexpr int kGroup = kRotates ? 1 : kBatch / 2;
    auto* q = reinterpret_cast<unsigned char*>(smem.q);
    const int warp_lane = fresh_lane_id();
    const int lane = warp_lane % kLanes;
    const int warp_row = this->warpgroup * kWarpgroupRows + this->thread / 32 * kWarpRows;
#pragma unroll 1
    for (int first = warp_lane / kLanes; first < kWarpRows; first += kRowsAtOnce * kBatch) {
      const int first_row = warp_row + first;
      // Address of a row's column, counted in 16-bit elements, of the stored or the converted row.
      auto place = [&](int column) { return SwizzledColumn<Traits::kTileM>(q, first_row, column); };
      Unit<Stored> stored[kBatch][kTurns];
      for_each_unit(lane, [&](int turn, int, const PairColumns& columns) {
        const auto low = place(columns.low * size_of(kFrom) / 2);
        const auto high = place(columns.high * size_of(kFrom) / 2);
        CUTE_UNROLL
        for (int i = 0; i < kBatch; ++i) {
          stored[i][turn] = {};
          if (first_row + i * kRowsAtOnce >= this->state.num_rows) continue;
          stored[i][turn] = {*reinterpret_cast<const Stored*>(low.at(i * kRowsAtOnce)),
                             *reinterpret_cast<const Stored*>(high.at(i * kRowsAtOnce))};
        }
      });
      __syncwarp();
      CUTE_UNROLL
      for (int group = 0; group < kBatch; group += kGroup) {
        Unit<FourFloats> units[kGroup][kTurns];
        for_each_unit(lane, [&](int turn, int unit, const PairColumns&) {
          CUTE_UNROLL
          for (int i = 0; i < kGroup; ++i) {
            auto& [low, high] = units[i][turn];
            low = FourFloats::of<kFrom>(stored[group + i][turn].low);
            high = FourFloats::of<kFrom>(stored[group + i][turn].high);
            if (kRotates) angles_of(first_row + group * kRowsAtOnce, unit).rotate(low, high);
          }
        });
        float factors[kGroup];
        CUTE_UNROLL
        for (float& factor : factors) factor = params.logits.q_factor;
        if constexpr (kFrom == DType::kBFloat16 && kTo == DType::kFloat16) {
          narrow(units, first_row + group * kRowsAtOnce, lane, factors);
        }
        for_each_unit(lane, [&](int turn, int unit, PairColumns columns) {
          if constexpr (kRotates && Traits::kSliced) columns = columns_in_slices(unit);
          const auto low = place(columns.low);
          const auto high = place(columns.high);
          CUTE_UNROLL
          for (int i = 0; i < kGroup; ++i) {
            const int offset = (group + i) * kRowsAtOnce;
            units[i][turn].low.multiply(factors[i]);
            units[i][turn].high.multiply(factors[i]);
            units[i][turn].low.template store<kTo>(low.at(offset));
            units[i][turn].high.template store<kTo>(high.at(offset));
          }
        });
      }
    }
  }
  // Columns of a unit in the order of rotated slices of K (ConvertedSlices).
  CUTE_DEVICE static PairColumns columns_in_slices(int unit) {
    constexpr int kHalf = Traits::kSliceColumns / 2;
    const int low = unit * kLanePairs / kHalf * 2 * kHalf + unit * kLanePairs % kHalf;
    return {low, low + kHalf};
  }
  // The units that a lane has of a row.
  CUTE_DEVICE void for_each_unit(int lane, const auto& visit) const {
    CUTE_UNROLL
    for (int turn = 0; turn < kTurns; ++turn) {
      const int unit = lane + turn * kLanes;
      visit(turn, unit, PairColumns::of(unit, params.head_dim_qk));
    }
  }
  // Brings rows into the range of float16, and leaves the inverses of their factors for the scores.
  template <int kGroup>
  CUTE_DEVICE void narrow(const Unit<FourFloats> (&units)[kGroup][kTurns], int first_row, int lane,
                          float (&factors)[kGroup]) const {
    float maxima[kGroup] = {};
    CUTE_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      for_each_unit(lane, [&](int turn, int, const PairColumns&) {
        const auto& [low, high] = units[i][turn];
        maxima[i] = fmaxf(maxima[i], fmaxf(low.maximum(), high.maximum()));
      });
    }
    CUTE_UNROLL
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      CUTE_UNROLL
      for (float& maximum : maxima) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, lanes));
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      const float factor = narrowing_factor(maxima[i]);
      if (lane == 0) {
        conversion_of(smem).query_scale[first_row + i * kRowsAtOnce] = inverse_power(factor);
      }
      factors[i] *= factor;
    }
  }
  CUTE_DEVICE LaneAngles angles_of(int row, int unit) const {
    const ItemState& state = this->state;
    int token = unpack_row(params, state.item.row_begin + row).token;
    int position = state.request.kv_len - state.request.qo_len + token;
    return LaneAngles::at<fast_rotation_by>(position, smem.rotary().frequency + unit * kLanePairs);
  }
};

template <class Traits>
using QueryOf = conditional_t<
    Traits::kConverts, ConvertedQuery<Traits>,
    conditional_t<Traits::kQuantizesQ, QuantizedQuery<Traits>, ArrivingQuery<Traits>>>;

}  // namespace preflash::sm90
