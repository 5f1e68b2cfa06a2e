// Properties of a tensor, in numbers: launches are bound to them, and runs bring the addresses.
#pragma once

#include <array>
#include <cstdint>

namespace preflash {

// Everything that checks read of a tensor, except its address.
struct TensorFacts {
  static constexpr int kMaxDims = 5;  // more than any tensor of a run has

  std::uint64_t dtype = 0;   // identifies the dtype
  std::uint64_t device = 0;  // identifies the device
  std::int32_t ndim = -1;    // -1: no tensor
  bool negative = false;     // a view that means its memory with the other sign
  std::array<std::int64_t, kMaxDims> shape = {};
  std::array<std::int64_t, kMaxDims> strides = {};  // in elements

  friend bool operator==(const TensorFacts&, const TensorFacts&) = default;
};

// Facts of the tensors of one segment. An out or lse that the run does not bring is allocated.
struct SegmentFacts {
  TensorFacts q, k, v;
  bool one_cache = false;  // holds K and V
  TensorFacts out, lse;
  char lse_layout = 0;  // the first letter of its name; 0: no lse is wanted
  // Tensors with a number per head (kHeadTensors), in their order.
  static constexpr int kHeadTensorCount = 4;
  std::array<TensorFacts, kHeadTensorCount> heads;

  friend bool operator==(const SegmentFacts&, const SegmentFacts&) = default;
};

}  // namespace preflash
