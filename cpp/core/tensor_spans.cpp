#include "core/tensor_spans.h"

#include <cstdint>

namespace preflash {
namespace {

MemorySpan span_of(const RowTensor& tensor, std::int64_t num_heads, std::int64_t head_dim,
                   DType dtype) {
  const std::int64_t size = size_of(dtype);
  return {.dimensions = {{{tensor.stride_token * size, tensor.num_tokens},
                          {tensor.stride_head * size, num_heads}}},
          .row_bytes = head_dim * size};
}

MemorySpan span_of(const KvTensor& tensor, std::int64_t num_heads, std::int64_t head_dim,
                   DType dtype) {
  const std::int64_t size = size_of(dtype);
  return {.dimensions = {{{tensor.stride_page * size, tensor.num_pages},
                          {tensor.stride_token * size, tensor.num_tokens},
                          {tensor.stride_head * size, num_heads}}},
          .row_bytes = head_dim * size};
}

MemorySpan span_of(const LseTensor& tensor, std::int64_t num_tokens, std::int64_t num_heads) {
  constexpr std::int64_t kSize = sizeof(float);
  return {.dimensions = {{{tensor.stride_token * kSize, num_tokens},
                          {tensor.stride_head * kSize, num_heads}}},
          .row_bytes = tensor.values() * kSize};
}

}  // namespace

TensorSpans spans_of(const ForwardSegment& segment, const AttentionOptions& options) {
  return {
      .q = span_of(segment.q, options.num_qo_heads, options.head_dim_qk, options.q_dtype),
      .k = span_of(segment.k, options.num_kv_heads, options.head_dim_qk, options.kv_dtype),
      .v = span_of(segment.v, options.num_kv_heads, options.head_dim_vo, options.kv_dtype),
      .o = span_of(segment.o, options.num_qo_heads, options.head_dim_vo, options.o_dtype),
      .lse = span_of(segment.lse, segment.q.num_tokens, options.num_qo_heads),
      .of_qo_heads = span_of_bytes(options.num_qo_heads * std::int64_t{sizeof(float)}),
      .of_kv_heads = span_of_bytes(options.num_kv_heads * std::int64_t{sizeof(float)}),
  };
}

}  // namespace preflash
