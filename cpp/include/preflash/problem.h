// What a caller asks for, as the planner sees it: host-visible lengths and the properties of one
// launch.
#pragma once

#include <cstdint>
#include <span>

#include "preflash/options.h"

namespace preflash {

struct Problem : AttentionOptions {
  std::span<const std::int32_t> qo_indptr;      // [batch + 1], tokens
  std::span<const std::int32_t> kv_indptr;      // [batch + 1], tokens (ragged) or pages (paged)
  std::span<const std::int32_t> last_page_len;  // [batch]; empty: ragged
  std::span<const std::int64_t> mask_indptr;    // [batch + 1], bytes; empty: no custom mask
  std::int32_t page_size = 0;                   // 0: ragged

  std::int64_t float_workspace_bytes = 0;  // the planner splits only as far as this reaches

  // CUDA graphs: sizes that later plans may not exceed. 0: not graph-safe, sizes are exact.
  std::int32_t graph_max_rows = 0;
};

}  // namespace preflash
