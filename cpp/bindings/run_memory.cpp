#include "bindings/run_memory.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "bindings/fast_call.h"
#include "bindings/guard.h"

namespace preflash {

namespace py = pybind11;

namespace {

// Memory of a contiguous tensor, by its shape; bytes are -1 if it is not contiguous.
TensorMemory seen(const dlpack::Tensor& tensor) {
  std::int64_t elements = 1;
  bool contiguous = true;
  for (std::int32_t i = tensor.ndim - 1; i >= 0; --i) {
    contiguous &= tensor.shape[i] == 1 || tensor.strides[i] == elements;
    elements *= tensor.shape[i];
  }
  const std::int64_t bytes = elements * tensor.dtype.bits * tensor.dtype.lanes / 8;
  return {.address = tensor.address(), .bytes = contiguous || elements == 0 ? bytes : -1};
}

TensorMemory seen(const Torch& torch, py::handle tensor) {
  if (const auto read = torch.read(tensor.ptr())) return seen(*read);
  const bool contiguous = tensor.attr("is_contiguous")().cast<bool>();
  return {.address = tensor.attr("data_ptr")().cast<Address>(),
          .bytes = contiguous ? tensor.attr("nbytes").cast<std::int64_t>() : -1};
}

// Calls a method without arguments and returns its result, an integer.
std::int64_t number_of(py::handle object, PyObject* method) {
  PyObject* const given[] = {object.ptr()};
  const auto result =
      py::reinterpret_steal<py::object>(PyObject_VectorcallMethod(method, given, 1, nullptr));
  if (!result) throw py::error_already_set();
  const std::int64_t number = PyLong_AsLongLong(result.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

struct Names {
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
  PyObject* itemsize = PyUnicode_InternFromString("itemsize");
};

// Bytes from the tensor's first element to the end of its storage.
std::int64_t room_of(py::handle tensor) {
  const Names& names = made_once<Names>([] { return Names{}; });
  PyObject* const given[] = {tensor.ptr()};
  const auto storage = py::reinterpret_steal<py::object>(
      PyObject_VectorcallMethod(names.untyped_storage, given, 1, nullptr));
  if (!storage) throw py::error_already_set();
  const std::int64_t bytes = number_of(storage, names.nbytes);
  const std::int64_t offset = number_of(tensor, names.storage_offset);
  return offset == 0 ? bytes : bytes - offset * tensor.attr(names.itemsize).cast<std::int64_t>();
}

}  // namespace

TensorMemory reach_of(const Torch& torch, std::string_view name, py::handle tensor) {
  const TensorMemory memory = seen(torch, tensor);
  if (memory.bytes < 0) {
    throw std::invalid_argument(std::string(name) +
                                " was given memory that is not contiguous; must be contiguous");
  }
  return memory;
}

TensorMemory memory_of(const Torch& torch, std::string_view name, py::handle tensor) {
  TensorMemory memory = reach_of(torch, name, tensor);
  memory.bytes = std::clamp<std::int64_t>(room_of(tensor), 0, memory.bytes);
  return memory;
}

RunMemory RunMemory::of_plan(const Torch& torch, py::object partials, py::object mask,
                             py::object kv_lens) {
  RunMemory memory;
  memory.partials = std::move(partials);
  if (!mask.is_none()) {
    memory.extras.mask_bits = pointer<const std::uint8_t>(torch.address_of(mask.ptr()));
  }
  if (!kv_lens.is_none()) {
    memory.extras.kv_lens = pointer<const std::int32_t>(torch.address_of(kv_lens.ptr()));
  }
  memory.owners = py::make_tuple(std::move(mask), std::move(kv_lens));
  return memory;
}

RunMemory RunMemory::of(const Torch& torch, py::object partials, py::dict of_extras) {
  RunMemory memory;
  memory.partials = std::move(partials);
  memory.owners = of_extras;
  RunExtras& extras = memory.extras;
  for (const auto& [key, tensor] : of_extras) {
    const auto name = key.cast<std::string>();
    const Address address = tensor.is_none() ? 0 : torch.address_of(tensor.ptr());
    if (name == "mask_bits") {
      extras.mask_bits = pointer<const std::uint8_t>(address);
    } else if (name == "mask_tiles") {
      extras.mask_tiles = pointer<std::uint32_t>(address);
    } else if (name == "kv_lens") {
      extras.kv_lens = pointer<const std::int32_t>(address);
    } else {
      const auto* of_heads = std::ranges::find(kHeadTensors, name, &HeadTensor::name);
      if (of_heads == std::end(kHeadTensors)) {
        throw py::type_error("RunMemory has no tensor named " + name);
      }
      extras.*of_heads->address = pointer<const float>(address);
    }
  }
  return memory;
}

void PinnedAddresses::hold(std::string name, py::object tensor, TensorMemory memory) {
  if (memory.bytes == 0) return;
  held_.push_back({.name = std::move(name), .tensor = std::move(tensor), .memory = memory});
}

void PinnedAddresses::check() const {
  for (const Held& held : held_) {
    const TensorMemory now = seen(*torch_, held.tensor);
    if (now.address != held.memory.address || now.bytes < held.memory.bytes) refuse(held);
  }
}

void PinnedAddresses::check_storage() const {
  for (const Held& held : held_) {
    if (memory_of(*torch_, held.name, held.tensor).bytes < held.memory.bytes) refuse(held);
  }
}

void PinnedAddresses::refuse(const Held& held) const {
  const std::int64_t bytes = memory_of(*torch_, held.name, held.tensor).bytes;
  const std::string needed = std::to_string(held.memory.bytes);
  const std::string now =
      bytes == 0
          ? " has no memory behind it (storage that was freed) and needs " + needed + " bytes"
      : bytes < held.memory.bytes ? " has " + std::to_string(bytes) + " bytes and needs " + needed
                                  : " is at another address, without what was put into it";
  throw std::invalid_argument(held.name + now + ": it was given other memory since " + since_ +
                              "; " + way_out_);
}

void bind_run_memory(py::module_& m) {
  py::class_<RunMemory>(m, "RunMemory")
      .def(py::init([](const Torch& torch, py::object partials, float skip_factor,
                       const py::kwargs& of_extras) {
             RunMemory memory = RunMemory::of(torch, std::move(partials), of_extras);
             memory.skip_factor = skip_factor;
             return memory;
           }),
           py::arg("torch"), py::arg("partials"), py::arg("skip_factor") = 0.0f);
  py::class_<PinnedAddresses, std::shared_ptr<PinnedAddresses>>(m, "PinnedAddresses")
      .def(py::init<std::shared_ptr<const Torch>, std::string, std::string>(), py::arg("torch"),
           py::arg("since"), py::arg("way_out"))
      .def(
          "hold",
          [](PinnedAddresses& held, std::string name, py::object tensor, Address address,
             std::int64_t bytes) {
            held.hold(std::move(name), std::move(tensor), {.address = address, .bytes = bytes});
            held.check_storage();
          },
          py::arg("name"), py::arg("tensor"), py::arg("address"), py::arg("bytes"))
      .def("check", &PinnedAddresses::check);
}

}  // namespace preflash
