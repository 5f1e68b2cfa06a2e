// How the 64 rows of an item's Q reach a consumer warpgroup: policies, of which QueryOf is the
// variant's. prefetch() requests the rows, and after arrive() the products may read them.
#pragma once

#include <bit>

#include "kernels/sm90/forward_convert.cuh"

namespace preflash::sm90 {

// The first element of a row of an item's Q.
CUTE_DEVICE std::int64_t query_offset(const HopperSegment& params, const ItemState& state,
                                      int row) {
  PackedRow packed = unpack_row(params, state.item.row_begin + row);
  std::int64_t token = std::int64_t{state.request.qo_begin} + packed.token;
  return token * params.q.stride_token +
         query_head(params, state.item, packed) * params.q.stride_head;
}

// The warpgroup reads them from memory, dequantises and rotates them.
template <class Traits>
struct QueryLoader {
  static constexpr DType kTo = Traits::kVariant.q_dtype;
  static constexpr int kUnits = Traits::kPairs / kLanePairs;  // of one row
  static constexpr int kLanes = std::min(32, static_cast<int>(std::bit_ceil(unsigned{kUnits})));
  static constexpr int kTurns = ceil_div(kUnits, kLanes);  // units of a lane, in one row

  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  const ItemState& state;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup

  // arrive() then finds the rows in the L2.
  CUTE_DEVICE void prefetch() const {
    constexpr int kLineBytes = 128;
    constexpr int kThreadsPerRow = kWarpgroupThreads / kWarpgroupRows;
    int row = warpgroup * kWarpgroupRows + thread / kThreadsPerRow;
    if (row >= state.num_rows) return;
    const unsigned char* source = row_of(row);
    int row_bytes = params.head_dim_qk * size_of(params.q_dtype);
    for (int byte = thread % kThreadsPerRow * kLineBytes; byte < row_bytes;
         byte += kThreadsPerRow * kLineBytes) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(source + byte));
    }
  }

  CUTE_DEVICE void arrive(const auto&) const {
    // Every warp has completed its products with the last item's rows.
    sync();
    if (Traits::kWidens && params.q_dtype == DType::kFloat8E4M3) {
      load_rows<DType::kFloat8E4M3>();
    } else if (Traits::narrows_query(params.q_dtype)) {
      load_rows<DType::kBFloat16>();
    } else {
      load_rows<kTo>();
    }
    order_memory_accesses();
    cutlass::arch::fence_view_async_shared();
    sync();
  }

 private:
  CUTE_DEVICE void sync() const {
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }
  CUTE_DEVICE const unsigned char* row_of(int row) const {
    return static_cast<const unsigned char*>(params.q.data) +
           query_offset(params, state, row) * size_of(params.q_dtype);
  }

  template <DType kFrom>
  CUTE_DEVICE void load_rows() const {
    constexpr int kRowsAtOnce = kWarpgroupThreads / kLanes;
    static_assert(kWarpgroupRows % kRowsAtOnce == 0);
#pragma unroll(kTurns == 1 ? 2 : 1)
    for (int i = thread / kLanes; i < kWarpgroupRows; i += kRowsAtOnce) {
      load_row<kFrom>(warpgroup * kWarpgroupRows + i, thread % kLanes);
    }
  }

  // Units first_unit + i * kLanes of a row, four pairs of dimensions each.
  template <DType kFrom>
  CUTE_DEVICE void load_row(int row, int first_unit) const {
    FourFloats low[kTurns], high[kTurns];
    float maximum = 0.0f;
    CUTE_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      load_unit<kFrom>(row, first_unit + i * kLanes, low[i], high[i]);
      maximum = fmaxf(maximum, fmaxf(low[i].maximum(), high[i].maximum()));
    }
    float factor = 1.0f;
    if constexpr (kFrom == DType::kBFloat16 && kTo == DType::kFloat16) {
      CUTE_UNROLL
      for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, lanes));
      }
      factor = narrowing_factor(maximum);
      if (first_unit == 0) smem.query_scale[row] = 1.0f / factor;
    }
    if (row >= state.num_rows) return;
    CUTE_UNROLL
    for (int i = 0; i < kTurns; ++i) {
      const int unit = first_unit + i * kLanes;
      if (unit >= kUnits) return;
      const PairColumns columns = PairColumns::of(unit, params.head_dim_qk);
      low[i].multiply(factor);
      high[i].multiply(factor);
      store(low[i], row, columns.low);
      store(high[i], row, columns.high);
    }
  }
  template <DType kFrom>
  CUTE_DEVICE void load_unit(int row, int unit, FourFloats& low, FourFloats& high) const {
    const PairColumns columns = PairColumns::of(unit, params.head_dim_qk);
    low = high = {};
    if (row < state.num_rows && columns.low < params.head_dim_qk) {
      const unsigned char* source = row_of(row);
      low = load<kFrom>(source + columns.low * size_of(kFrom));
      high = load<kFrom>(source + columns.high * size_of(kFrom));
    }
    if (params.position == Position::kRope && unit < kUnits) {
      int token = unpack_row(params, state.item.row_begin + row).token;
      int position = state.request.kv_len - state.request.qo_len + token;
      LaneAngles::at<fast_rotation_by>(position, smem.rotary().frequency + unit * kLanePairs)
          .rotate(low, high);
    }
    // sm_scale <= 0 is applied through Q's sign (LogitsParams).
    low.multiply(params.logits.q_factor);
    high.multiply(params.logits.q_factor);
  }

  template <DType kFrom>
  CUTE_DEVICE static FourFloats load(const unsigned char* source) {
    return FourFloats::of<kFrom>(__ldg(reinterpret_cast<const FourStored<kFrom>*>(source)));
  }
  CUTE_DEVICE void store(const FourFloats& four, int row, int column) const {
    auto* q = reinterpret_cast<unsigned char*>(smem.q);
    four.store<kTo>(q + swizzled<Traits::kTileM>(row, column));
  }
};

// A producer loads them (load_tma.cuh).
template <class Traits>
struct ArrivingQuery {
  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  const ItemState& state;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup

  CUTE_DEVICE static void prefetch() {}

  CUTE_DEVICE void arrive(const auto& q_read) const {
    smem.barriers.q_full[q_read.index()].wait(q_read.phase());
    order_memory_accesses();
    multiply(params.logits.q_factor, q_read.index());
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
    order_memory_accesses();
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }
};

template <class Traits>
using QueryOf = conditional_t<Traits::kConverts, QueryLoader<Traits>, ArrivingQuery<Traits>>;

}  // namespace preflash::sm90
