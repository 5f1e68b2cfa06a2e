// Packed rows and page slots: where row r of a tile and key j of a request lie.
#pragma once

#include "kernels/common/launch_params.cuh"

namespace preflash {

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

// Slot of a key's row: its page and its token in the page. Ragged tensors are one page.
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
