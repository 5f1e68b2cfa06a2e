// The largest tensors of one segment that CUDA graphs captured. Engines capture one run for every
// number of rows, and replay the one that a batch fits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/batch.h"
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

  // Throws std::invalid_argument if a batch reaches beyond these tensors. largest_page: of the
  // batch; -1: not known, or ragged.
  void check(const Batch& batch, std::int64_t largest_page) const {
    const std::string has = ": a CUDA graph has captured a run() with ";
    const std::string larger =
        "; capture it with as many as the largest batch has, or use another wrapper";
    if (batch.qo_end() > q_tokens) {
      throw std::invalid_argument("qo_indptr[-1] = " + std::to_string(batch.qo_end()) + has +
                                  std::to_string(q_tokens) + " rows of q" + larger);
    }
    if (page_size != batch.page_size()) {
      throw std::invalid_argument("page_size=" + std::to_string(batch.page_size()) + has +
                                  "pages of " + std::to_string(page_size) +
                                  ", which it holds on to; use another wrapper");
    }
    if (page_size == 0 && batch.kv_end() > kv_extent) {
      throw std::invalid_argument("kv_indptr[-1] = " + std::to_string(batch.kv_end()) + has +
                                  std::to_string(kv_extent) + " tokens in k and v" + larger);
    }
    if (largest_page >= kv_extent) {
      throw std::invalid_argument("paged_kv_indices holds " + std::to_string(largest_page) + has +
                                  std::to_string(kv_extent) + " pages, so an index must be less");
    }
  }
};

}  // namespace preflash
