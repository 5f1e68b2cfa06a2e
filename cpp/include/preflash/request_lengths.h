// The requests of a batch whose lengths the host does not know: one rule for the GPU and the CPU.
#pragma once

#include <cstdint>

#include "preflash/params.h"

namespace preflash {

PREFLASH_HD constexpr std::int64_t clamped(std::int64_t value, std::int64_t low,
                                           std::int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Sets what depends on lengths in request i; its chunks and its mask remain the plan's. The
// lengths are clamped to the tensors, whatever the arrays hold.
PREFLASH_HD constexpr void set_length(const RequestLengths& lengths, int i, RequestInfo& request) {
  const std::int64_t qo_begin = clamped(lengths.qo_indptr[i], 0, lengths.qo_tokens);
  const std::int64_t qo_end = clamped(lengths.qo_indptr[i + 1], qo_begin, lengths.qo_tokens);
  std::int64_t kv_begin = std::int64_t{i} * lengths.table_stride;
  std::int64_t kv_end = lengths.kv_tokens;
  if (lengths.kv_indptr != nullptr) {
    kv_begin = clamped(lengths.kv_indptr[i], 0, lengths.kv_tokens);
    kv_end = clamped(lengths.kv_indptr[i + 1], kv_begin, lengths.kv_tokens) - kv_begin;
  }
  const std::int64_t longest_kv = kv_end < lengths.max_kv_len ? kv_end : lengths.max_kv_len;
  request.qo_begin = static_cast<std::int32_t>(qo_begin);
  request.qo_len = static_cast<std::int32_t>(clamped(qo_end - qo_begin, 0, lengths.max_qo_len));
  request.kv_begin = static_cast<std::int32_t>(kv_begin);
  request.kv_len = static_cast<std::int32_t>(clamped(lengths.kv_lens[i], 0, longest_kv));
}

}  // namespace preflash
