// What a caller asks for, as the planner sees it: host-visible lengths and the properties of one
// launch.
#pragma once

#include <cstdint>
#include <span>

#include "preflash/device_services.h"
#include "preflash/types.h"

namespace preflash {

struct SplitPolicy {
  // Keys per KV chunk, rounded up to whole tiles; 0 lets the planner choose. With a fixed size or
  // with `disable` a request's result does not depend on what else is in the batch.
  std::int32_t fixed_split_size = 0;
  bool disable = false;
};

struct Problem {
  std::span<const std::int32_t> qo_indptr;      // [batch + 1], tokens
  std::span<const std::int32_t> kv_indptr;      // [batch + 1], tokens (ragged) or pages (paged)
  std::span<const std::int32_t> last_page_len;  // [batch]; empty: ragged
  std::span<const std::int64_t> mask_indptr;    // [batch + 1], bytes; empty: no custom mask
  std::int32_t page_size = 0;                   // 0: ragged

  std::int32_t num_qo_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim_qk = 0;
  std::int32_t head_dim_vo = 0;
  DType q_dtype = DType::kFloat16;
  DType kv_dtype = DType::kFloat16;
  bool causal = false;  // ignored by callers when a custom mask is given
  std::int32_t window_left = -1;
  float soft_cap = 0.0f;  // 0: off
  Mask mask = Mask::kBounds;

  SplitPolicy split;
  std::int64_t float_workspace_bytes = 0;  // the planner splits only as far as this reaches

  // CUDA graphs: sizes that later plans may not exceed. 0: not graph-safe, sizes are exact.
  std::int32_t graph_max_rows = 0;
};

// What a kernel of the family must be compiled for, to serve the problem.
inline Variant variant_of(const Problem& problem, Family family,
                          TileClass tile_class = TileClass::kPrefill) {
  return {.family = family,
          .q_dtype = problem.q_dtype,
          .kv_dtype = problem.kv_dtype,
          .head_dim_qk = problem.head_dim_qk,
          .head_dim_vo = problem.head_dim_vo,
          .tile_class = tile_class,
          .logits = problem.soft_cap > 0.0f ? Logits::kSoftCap : Logits::kPlain,
          .mask = problem.mask};
}

}  // namespace preflash
