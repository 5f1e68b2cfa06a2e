// Packed rows and page slots: where row r of a tile and key j of a request lie. Divisions by
// group_size and page_size are on every row's path; cutlass::FastDivmod makes each
// a multiplication, a shift and a multiply-add.
#pragma once

#include <cutlass/fast_math.h>

#include "kernels/common/logits.cuh"
#include "preflash/params.h"

namespace preflash {

// ForwardSegment as the kernels take it: derived constants made once, on the host.
// NOTE: a divisor's words load in pairs only where `group` begins 4 bytes past a multiple of 8. A
// pointer more at the end of ForwardSegment cost the fa3 main loop two instructions.
struct KernelSegment : ForwardSegment {
  cutlass::FastDivmod group;  // by group_size
  cutlass::FastDivmod page;   // by page_size
  LogitsParams logits;

  static KernelSegment make(const ForwardSegment& segment) {
    return {segment, cutlass::FastDivmod(segment.group_size),
            cutlass::FastDivmod(segment.page_size),
            LogitsParams::make(segment.sm_scale, segment.soft_cap)};
  }
};

// ForwardParams as a kernel of so many segments takes them. Segment: the family's own.
template <class Segment, int kSegments = 1>
struct LaunchParams {
  Segment segments[kSegments];
  const RequestInfo* requests;
  const WorkItem* items;
  const std::int32_t* cta_begin;
  std::int32_t num_lists = 0;  // of items: CTAs as planned
#ifdef PREFLASH_TRACE
  ItemRecord* records = nullptr;  // ForwardParams::records
#endif

  // NOTE: with one segment the index is a constant, and so is the place of every parameter.
  __device__ __forceinline__ const Segment& segment(int index) const {
    return segments[kSegments == 1 ? 0 : index];
  }
  __device__ __forceinline__ const Segment& segment_of(const RequestInfo& request) const {
    return segment(request.segment);
  }
};

using KernelParams = LaunchParams<KernelSegment>;

// Row r of a request and KV head is token r / group_size of query head
// kv_head * group_size + r % group_size, so that one K/V tile serves all query heads of its group.
struct PackedRow {
  int token;
  int head_in_group;
};

__device__ __forceinline__ PackedRow unpack_row(const KernelSegment& params, int row) {
  PackedRow packed;
  params.group(packed.token, packed.head_in_group, row);
  return packed;
}

// Where a key's row lies: a page and a place in it. Ragged tensors are one page.
struct KeySlot {
  int page;
  int token;
};

// kv_begin: the request's first row (ragged) or first entry of page_indices (paged).
__device__ __forceinline__ KeySlot find_slot(const KernelSegment& params, int kv_begin, int key) {
  if (params.page_indices == nullptr) return {0, kv_begin + key};
  KeySlot slot;
  int page;
  params.page(page, slot.token, key);
  slot.page = __ldg(params.page_indices + kv_begin + page);
  return slot;
}

__device__ __forceinline__ std::int64_t slot_offset(const KvTensor& tensor, KeySlot slot) {
  return slot.page * tensor.stride_page + slot.token * tensor.stride_token;
}

}  // namespace preflash
