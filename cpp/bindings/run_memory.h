// Memory that runs use besides their own tensors. Callers hold these tensors too, and may give them
// other memory at any time: `tensor.data = other`, set_(), resize_() of a storage.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/torch_tensors.h"
#include "preflash/params.h"

namespace preflash {

// Current memory of a tensor.
struct TensorMemory {
  Address address = 0;
  std::int64_t bytes = 0;
};

// At most the bytes of the tensor's storage. Throws std::invalid_argument for a tensor that is not
// contiguous.
TensorMemory memory_of(const Torch& torch, std::string_view name, pybind11::handle tensor);
// The same by the tensor's shape alone, for memory that outputs must not overlap.
TensorMemory reach_of(const Torch& torch, std::string_view name, pybind11::handle tensor);

// Memory that a launch uses besides the work list and the tensors of a segment.
struct RunMemory {
  pybind11::object partials = pybind11::none();  // a tensor, or None: the plan has none
  RunExtras extras;
  float skip_factor = 0.0f;  // of this run, for a plan that skips; 0: the plan's
  pybind11::object owners;   // of what extras points at

  // mask, kv_lens: tensors or None.
  static RunMemory of_plan(const Torch& torch, pybind11::object partials, pybind11::object mask,
                           pybind11::object kv_lens);
  // of_extras: tensors or None, by the names of their fields in RunExtras. Throws pybind11's
  // type_error for others.
  static RunMemory of(const Torch& torch, pybind11::object partials, pybind11::dict of_extras);
};

// Tensors whose memory must stay, because kernels use its address.
class PinnedAddresses {
 public:
  // since, way_out: for errors, when the memory was right, and what to do where it is not.
  PinnedAddresses(std::shared_ptr<const Torch> torch, std::string since, std::string way_out)
      : torch_(std::move(torch)), since_(std::move(since)), way_out_(std::move(way_out)) {}

  void hold(std::string name, pybind11::object tensor, TensorMemory memory);
  // Throws std::invalid_argument for the first tensor with less memory or other memory.
  // NOTE: compares addresses and shapes only, because every run comes here. Memory that was freed
  // and allocated again at the same address passes.
  void check() const;
  // The same with the storages, for memory that may have been gone before hold().
  void check_storage() const;
  const Torch& torch() const { return *torch_; }

 private:
  struct Held {
    std::string name;
    pybind11::object tensor;
    TensorMemory memory;
  };

  [[noreturn]] void refuse(const Held& held) const;

  std::shared_ptr<const Torch> torch_;
  std::string since_, way_out_;
  std::vector<Held> held_;
};

}  // namespace preflash
