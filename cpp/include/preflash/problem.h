// Input of the planner: host-visible lengths and the properties of one launch, segment by segment.
#pragma once

#include <cstdint>
#include <span>

#include "preflash/options.h"
#include "preflash/per_segment.h"

namespace preflash {

// Keys of a request: `units` of them (ragged), or in so many pages whose last one holds
// last_page_len. 64 bits: lengths that validate() is about to refuse must not wrap around.
constexpr std::int64_t kv_length(std::int64_t units, std::int32_t page_size,
                                 std::int32_t last_page_len) {
  if (page_size == 0) return units;
  return units > 0 ? (units - 1) * page_size + last_page_len : 0;
}

struct SegmentProblem : AttentionOptions {
  std::span<const std::int32_t> qo_indptr;      // [batch + 1], tokens
  std::span<const std::int32_t> kv_indptr;      // [batch + 1], tokens (ragged) or pages (paged)
  std::span<const std::int32_t> last_page_len;  // [batch]; empty: ragged
  // [batch]: where a request's pages begin in the page indices; empty: at kv_indptr[i].
  std::span<const std::int32_t> page_begin;
  std::span<const std::int64_t> mask_indptr;  // [batch + 1], bytes; empty: no custom mask
  std::int32_t page_size = 0;                 // 0: ragged
  // True if lengths of keys, or of queries and keys, are upper bounds: only the device knows the
  // lengths of a run. Batch::describe() sets it if either flag of Batch is set.
  bool lengths_are_upper_bounds = false;

  bool paged() const { return page_size != 0 || !last_page_len.empty(); }
  std::int64_t qo_len(std::size_t request) const {
    return std::int64_t{qo_indptr[request + 1]} - qo_indptr[request];
  }
  std::int32_t kv_begin(std::size_t request) const {
    return page_begin.empty() ? kv_indptr[request] : page_begin[request];
  }
  std::int64_t kv_len(std::size_t request) const {
    std::int64_t units = std::int64_t{kv_indptr[request + 1]} - kv_indptr[request];
    return paged() ? kv_length(units, page_size, last_page_len[request]) : units;
  }

  // CUDA graphs: sizes that later plans may not exceed. 0: not graph-safe, sizes are exact.
  std::int32_t graph_max_rows = 0;
  std::int64_t graph_mask_bytes = 0;  // of the packed custom mask; 0: no plan has one
};

struct Problem {
  PerSegment<SegmentProblem> segments;
  // For the partials of all segments: the planner splits only as far as this reaches.
  std::int64_t float_workspace_bytes = 0;
  std::int64_t copy_bytes = 0;  // what copies of the operands take of the same buffer, behind these
};

// Copies begin at a multiple of so many bytes: sectors and TMA's boxes begin there.
inline constexpr std::int64_t kCopyAlignment = 128;

}  // namespace preflash
