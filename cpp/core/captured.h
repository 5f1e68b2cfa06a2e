// The largest tensors of one segment that CUDA graphs captured. Engines capture one run for every
// number of rows, and replay the one that a batch fits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/launch.h"

namespace preflash {

struct Captured {
  std::int64_t q_tokens = 0;
  std::int64_t kv_extent = 0;  // pages, or tokens where there are none
  int page_size = 0;           // 0: ragged

  // page_size: of the plan.
  static Captured of(const RunTensors& tensors, int page_size) {
    const KvTensor &k = tensors.k, &v = tensors.v;
    return {.q_tokens = tensors.q.num_tokens,
            .kv_extent = page_size > 0 ? std::min(k.num_pages, v.num_pages)
                                       : std::min(k.num_tokens, v.num_tokens),
            .page_size = page_size};
  }

  Captured or_larger(const Captured& other) const {
    return {.q_tokens = std::max(q_tokens, other.q_tokens),
            .kv_extent = std::max(kv_extent, other.kv_extent),
            .page_size = std::max(page_size, other.page_size)};
  }
};

}  // namespace preflash
