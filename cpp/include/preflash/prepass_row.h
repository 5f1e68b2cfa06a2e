// Source, target and rotation of a row that the pre-pass copies: the one place that
// follows requests and the page table for it, on the GPU and on the CPU alike.
#pragma once

#include <cstdint>

#include "preflash/params.h"
#include "preflash/types.h"

namespace preflash {

struct PrepassRow {
  std::int64_t from = 0;  // elements from the operand's first one, of head 0
  std::int64_t to = 0;
  std::int32_t position = 0;  // of RoPE
};

// The last request that begins at or before a row; requests without rows begin where the next one
// does. `begin` tells where a request begins, and no request ends before the row does.
template <class Begin>
PREFLASH_HD inline std::int32_t request_of_row(std::int32_t num_requests, std::int32_t row,
                                               const Begin& begin) {
  std::int32_t first = 0, count = num_requests;
  while (count > 1) {
    const std::int32_t half = count / 2;
    if (begin(first + half) <= row) {
      first += half;
      count -= half;
    } else {
      count = half;
    }
  }
  return first;
}

// row: of num_keys.
PREFLASH_HD inline PrepassRow prepass_key(const PrepassParams& params,
                                          const PrepassOperand& operand, std::int32_t row) {
  const RequestInfo* requests = params.requests;
  const std::int32_t request = request_of_row(params.num_requests, row,
                                              [=](std::int32_t i) { return requests[i].kv_begin; });
  PrepassRow copy;
  copy.to = row * operand.to.stride_token;
  copy.position = row - requests[request].kv_begin;
  const KvTensor& from = operand.from;
  if (params.page_indices == nullptr) {
    copy.from = (params.kv_begin + row) * from.stride_token;
    return copy;
  }
  const std::int32_t nth = copy.position / params.page_size;
  const std::int32_t slot = copy.position - nth * params.page_size;
  const std::int64_t page = params.page_indices[params.page_begin[request] + nth];
  copy.from = page * from.stride_page + slot * from.stride_token;
  return copy;
}

// row: of num_queries, counted from the first request's first one.
PREFLASH_HD inline PrepassRow prepass_query(const PrepassParams& params,
                                            const PrepassOperand& operand, std::int32_t row) {
  const RequestInfo* requests = params.requests;
  const std::int32_t token = params.qo_begin + row;
  const std::int32_t index = request_of_row(params.num_requests, token,
                                            [=](std::int32_t i) { return requests[i].qo_begin; });
  const RequestInfo& request = requests[index];
  return {.from = token * operand.from.stride_token,
          .to = token * operand.to.stride_token,
          .position = request.kv_len - request.qo_len + token - request.qo_begin};
}

}  // namespace preflash
