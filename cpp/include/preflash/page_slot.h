// Page and slot to which append_paged_kv_cache writes a token. No other code follows a page table
// for it.
#pragma once

#include <cstdint>

#include "preflash/params.h"
#include "preflash/types.h"

namespace preflash {

PREFLASH_HD inline std::int64_t index_at(const IndexArray& array, std::int64_t i) {
  return array.width == IndexWidth::k64
             ? static_cast<const std::int64_t*>(array.data)[i * array.stride]
             : static_cast<const std::int32_t*>(array.data)[i * array.stride];
}

struct PageSlot {
  std::int64_t page = -1;  // -1: the token goes nowhere
  std::int64_t slot = 0;

  PREFLASH_HD std::int64_t offset_in(const AppendedRows& rows) const {
    return page * rows.pool_page + slot * rows.pool_slot;
  }
};

// Returns page -1 for padding, and for a token that the table has no place for: a kernel cannot
// report an error, but it must not write elsewhere. PREFLASH_DEBUG=1 reports the latter to the
// caller.
PREFLASH_HD inline PageSlot page_slot(const AppendParams& params, std::int64_t token) {
  const std::int64_t request = index_at(params.batch_indices, token);
  const std::int64_t position = index_at(params.positions, token);
  if (request < 0 || request >= params.page_indptr.count - 1) return {};
  // Lengths have 32 bits, and so has the division.
  if (position < 0 || position > INT32_MAX) return {};
  const std::int32_t nth = static_cast<std::int32_t>(position) / params.page_size;
  std::int64_t entry = index_at(params.page_indptr, request) + nth;
  // The entry past a request's last one is the next request's page.
  if (entry < 0 || entry >= index_at(params.page_indptr, request + 1)) return {};
  if (params.table_width > 0) {
    if (nth >= params.table_width) return {};
    entry = request * params.table_stride + nth;
  }
  if (entry >= params.page_indices.count) return {};
  const std::int64_t page = index_at(params.page_indices, entry);
  if (page < 0 || page >= params.num_pages) return {};
  return {.page = page, .slot = position - std::int64_t{nth} * params.page_size};
}

}  // namespace preflash
