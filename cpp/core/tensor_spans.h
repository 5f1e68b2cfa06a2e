// Bytes that the tensors of one segment touch.
#pragma once

#include "core/memory_span.h"
#include "preflash/options.h"
#include "preflash/params.h"

namespace preflash {

// Spans of the tensors of one segment, from the addresses that each run() brings.
struct TensorSpans {
  MemorySpan q;
  MemorySpan k;
  MemorySpan v;
  MemorySpan o;
  MemorySpan lse;
  MemorySpan of_qo_heads;  // those of kHeadTensors
  MemorySpan of_kv_heads;

  const MemorySpan& of(const HeadTensor& tensor) const {
    return tensor.heads == Heads::kQuery ? of_qo_heads : of_kv_heads;
  }
};

// options: those of the plan, in whose dtypes the tensors are.
TensorSpans spans_of(const ForwardSegment& segment, const AttentionOptions& options);

// Span of contiguous bytes.
inline MemorySpan span_of_bytes(std::int64_t bytes) { return {.row_bytes = bytes}; }

}  // namespace preflash
