// torch's tensors as C++ reads them without linking with torch: through the table of functions that
// torch offers by DLPack's C exchange protocol (2.11 does, older ones do not).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <span>

#include "bindings/bindings.h"
#include "core/tensor_facts.h"

namespace preflash {

// The protocol's structures, version 1. See dmlc.github.io/dlpack.
namespace dlpack {

struct Device {
  std::int32_t type;
  std::int32_t id;

  friend bool operator==(const Device&, const Device&) = default;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;

  friend bool operator==(const DataType&, const DataType&) = default;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  const std::int64_t* shape;    // [ndim]
  const std::int64_t* strides;  // [ndim], in elements
  std::uint64_t byte_offset;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data) + byte_offset; }
};

struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  ExchangeApi* previous;
  void* functions_of_ownership[3];
  // 0, or -1 with Python's exception set. The tensor lends its shape and strides.
  int (*read)(void* object, Tensor* tensor);
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

constexpr std::int32_t kCpu = 1;  // a Device's type
constexpr std::int32_t kCuda = 2;
constexpr std::uint8_t kInt = 0;  // a DataType's code: signed integers
constexpr DataType kInt32 = {.code = kInt, .bits = 32, .lanes = 1};

}  // namespace dlpack

// Current facts and address of a tensor.
struct SeenTensor {
  TensorFacts facts;
  Address address = 0;
};

// Access of runs to torch: to tensors, streams, and the state of autograd and jit.
struct Torch {
  // autograd: the module torch.autograd.
  Torch(const pybind11::object& tensor_type, const pybind11::object& is_tracing,
        const pybind11::object& is_grad_enabled, const pybind11::object& autograd);

  // An ordinary tensor's state; none for subclasses, tensors without memory or strides, dtypes that
  // the protocol does not know, and an older torch.
  std::optional<dlpack::Tensor> read(PyObject* object) const;
  // The same for any tensor: through its methods where the protocol cannot read it. Throws what
  // these raise.
  SeenTensor see(PyObject* object) const;
  // Address of a tensor's first element.
  Address address_of(PyObject* object) const;
  // The stream that is current on a CUDA device. None where torch does not say.
  std::optional<void*> current_stream(int device) const;
  // True if jit traces, or autograd records these tensors, which are read or written.
  bool records(std::span<PyObject* const> tensors) const;
  // Reports a write that autograd did not see: an operation that saved the tensor for its
  // gradient raises in backward().
  void tell_written(PyObject* tensor) const;

 private:
  bool is_negative(PyObject* tensor) const;

  const dlpack::ExchangeApi* exchange_ = nullptr;  // null: an older torch
  pybind11::object tensor_type_, is_tracing_, is_grad_enabled_, forward_ad_, increment_version_;
  pybind11::object requires_grad_, current_level_, is_neg_;  // names
};

}  // namespace preflash
