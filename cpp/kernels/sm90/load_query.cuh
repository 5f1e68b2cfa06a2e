// Loads of Q in kernels that transform their operands: a consumer warpgroup reads its 64 rows of an
// item from memory, widens and rotates them, and writes them where its products read them.
#pragma once

#include "kernels/sm90/forward_transform.cuh"

namespace preflash::sm90 {

template <class Traits>
struct QueryLoader {
  static constexpr DType kTo = Traits::kVariant.q_dtype;
  static constexpr int kUnits = Traits::kPairs / kLanePairs;  // of one row

  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  const ItemState& state;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup

  // Asks for the rows ahead of time, so that run() finds them in the L2.
  __device__ __forceinline__ void prefetch() const {
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

  __device__ __forceinline__ void run() const {
    // Every warp's products with the rows of the last item are complete.
    sync();
    if (params.q_dtype == DType::kFloat8E4M3) {
      load_rows<DType::kFloat8E4M3>();
    } else {
      load_rows<kTo>();
    }
    order_memory_accesses();
    cutlass::arch::fence_view_async_shared();
    sync();
  }

 private:
  __device__ __forceinline__ void sync() const {
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }

  __device__ __forceinline__ const unsigned char* row_of(int row) const {
    PackedRow packed = unpack_row(params, state.item.row_begin + row);
    std::int64_t token = std::int64_t{state.request.qo_begin} + packed.token;
    std::int64_t offset = token * params.q.stride_token +
                          query_head(params, state.item, packed) * params.q.stride_head;
    return static_cast<const unsigned char*>(params.q.data) + offset * size_of(params.q_dtype);
  }

  template <DType kFrom>
  __device__ __forceinline__ void load_rows() const {
    static_assert(kWarpgroupRows * kUnits % kWarpgroupThreads == 0);
#pragma unroll 2
    for (int i = thread; i < kWarpgroupRows * kUnits; i += kWarpgroupThreads) {
      int row = warpgroup * kWarpgroupRows + i / kUnits;
      if (row < state.num_rows) load_unit<kFrom>(row, i % kUnits);
    }
  }

  // Four pairs of dimensions of one row.
  template <DType kFrom>
  __device__ __forceinline__ void load_unit(int row, int unit) const {
    const unsigned char* source = row_of(row);
    PairColumns columns = PairColumns::of(unit, params.head_dim_qk);
    FourFloats low = {}, high = {};
    if (columns.low < params.head_dim_qk) {
      low = load<kFrom>(source + columns.low * size_of(kFrom));
      high = load<kFrom>(source + columns.high * size_of(kFrom));
    }
    if (params.position == Position::kRope) {
      int token = unpack_row(params, state.item.row_begin + row).token;
      int position = state.request.kv_len - state.request.qo_len + token;
      LaneAngles::at(position, smem.frequency + unit * kLanePairs).rotate(low, high);
    }
    store(low, row, columns.low);
    store(high, row, columns.high);
  }
  template <DType kFrom>
  __device__ __forceinline__ static FourFloats load(const unsigned char* source) {
    return FourFloats::of<kFrom>(__ldg(reinterpret_cast<const FourStored<kFrom>*>(source)));
  }
  // NOTE: sm_scale <= 0 is applied through Q's sign (LogitsParams).
  __device__ __forceinline__ void store(FourFloats& four, int row, int column) const {
    CUTE_UNROLL
    for (float2& pair : four.pair) {
      pair.x *= params.logits.q_factor;
      pair.y *= params.logits.q_factor;
    }
    auto* q = reinterpret_cast<unsigned char*>(smem.q);
    four.store<kTo>(q + swizzled<Traits::kTileM>(row, column));
  }
};

}  // namespace preflash::sm90
