// Launch parameters as kernels take them. ForwardParams and its members may get fields, in any
// order, without a change to a kernel.
#pragma once

#include <cutlass/fast_math.h>

#include "kernels/common/logits.cuh"
#include "preflash/params.h"

namespace preflash {

// Division on a row's path: a multiplication, a shift and a multiply-add, as cutlass::FastDivmod
// does it. The two words that are read together load as one.
struct Divisor {
  alignas(8) std::uint32_t multiplier;
  std::uint32_t shift;
  std::int32_t divisor;

  static Divisor make(int divisor) {
    const cutlass::FastDivmod made(divisor);
    return {made.multiplier, made.shift_right, divisor};
  }
  __device__ __forceinline__ void operator()(int& quotient, int& remainder, int dividend) const {
    quotient = divisor != 1 ? __umulhi(dividend, multiplier) >> shift : dividend;
    remainder = dividend - quotient * divisor;
  }
};

// Fields of a segment that the kernels of all families read, named as in ForwardSegment.
struct KernelSegment {
  // Everybody: rows, keys, columns.
  Divisor group;  // group_size
  std::int32_t group_size;
  std::int32_t num_qo_heads;
  std::int32_t head_dim_qk;
  std::int32_t head_dim_vo;
  MaskBounds bounds;  // without lengths
  ChunkOrigin chunk_origin;
  Position position;

  // Loads.
  DType q_dtype;
  DType kv_dtype;
  RowTensor q;
  KvTensor k;
  KvTensor v;
  Divisor page;  // the page size
  const std::int32_t* page_indices;

  // Scores.
  Mask mask;
  float soft_cap;
  float skip_factor;
  LogitsParams logits;
  RunExtras extras;

  // Results.
  DType o_dtype;
  RowTensor o;
  LseTensor lse;
  float* partial_o;
  PartialLse* partial_lse;
  float out_scale;

  static KernelSegment make(const ForwardSegment& segment) {
    return {.group = Divisor::make(segment.group_size),
            .group_size = segment.group_size,
            .num_qo_heads = segment.num_qo_heads,
            .head_dim_qk = segment.head_dim_qk,
            .head_dim_vo = segment.head_dim_vo,
            .bounds = bounds_of(segment, {}),
            .chunk_origin = segment.chunk_origin,
            .position = segment.position,
            .q_dtype = segment.q_dtype,
            .kv_dtype = segment.kv_dtype,
            .q = segment.q,
            .k = segment.k,
            .v = segment.v,
            .page = Divisor::make(segment.page_size),
            .page_indices = segment.page_indices,
            .mask = segment.mask,
            .soft_cap = segment.soft_cap,
            .skip_factor = segment.skip_factor,
            .logits = LogitsParams::make(segment.sm_scale, segment.soft_cap),
            .extras = segment.extras,
            .o_dtype = segment.o_dtype,
            .o = segment.o,
            .lse = segment.lse,
            .partial_o = segment.partial_o,
            .partial_lse = segment.partial_lse,
            .out_scale = segment.out_scale};
  }
};

__device__ __forceinline__ MaskBounds bounds_of(const KernelSegment& segment,
                                                const RequestInfo& request) {
  MaskBounds bounds = segment.bounds;
  bounds.qo_len = request.qo_len;
  bounds.kv_len = request.kv_len;
  return bounds;
}

// ForwardParams for a kernel of kSegments segments. Segment: the family's own.
template <class Segment, int kSegments = 1>
struct LaunchParams {
  Segment segments[kSegments];
  const RequestInfo* requests;
  const WorkItem* items;
  const std::int32_t* cta_begin;
#ifdef PREFLASH_TRACE
  ItemRecord* records;  // ForwardParams::records
#endif

  // Fills all fields but the segments.
  static LaunchParams make(const ForwardParams& params) {
    LaunchParams made{};
    made.requests = params.requests;
    made.items = params.items;
    made.cta_begin = params.cta_begin;
#ifdef PREFLASH_TRACE
    made.records = params.records;
#endif
    return made;
  }

  // With one segment the index is a constant, and so is the place of every parameter.
  __device__ __forceinline__ const Segment& segment(int index) const {
    return segments[kSegments == 1 ? 0 : index];
  }
  __device__ __forceinline__ const Segment& segment_of(const RequestInfo& request) const {
    return segment(request.segment);
  }
  // Request i with the keys that it has now (RunExtras::kv_lens).
  __device__ __forceinline__ RequestInfo request(int i) const {
    const RequestInfo planned = requests[i];
    const std::int32_t* kv_lens = segment_of(planned).extras.kv_lens;
    return kv_lens == nullptr ? planned : with_keys(planned, __ldg(kv_lens + i));
  }
};

}  // namespace preflash
