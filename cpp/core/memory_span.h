// Bytes that a strided tensor touches, to refuse outputs that overlap inputs.
#pragma once

#include <array>
#include <cstdint>

namespace preflash {

// A tensor's rows of contiguous bytes, in bytes from its address. Strides are not negative.
struct MemorySpan {
  struct Dimension {
    std::int64_t stride = 0;
    std::int64_t count = 1;

    friend bool operator==(const Dimension&, const Dimension&) = default;
  };

  std::array<Dimension, 3> dimensions = {};
  std::int64_t row_bytes = 0;

  bool empty() const;
  // One past the last byte; 0 for an empty tensor.
  std::int64_t extent() const;

  friend bool operator==(const MemorySpan&, const MemorySpan&) = default;
};

// True if two tensors may share a byte. Exact for tensors side by side, and for parts of one packed
// tensor, such as q, k and v in the rows of [tokens, 3, heads, head_dim]. For unrelated strides it
// may return true for tensors that merely interleave.
bool may_overlap(const void* a, const MemorySpan& a_span, const void* b, const MemorySpan& b_span);

}  // namespace preflash
