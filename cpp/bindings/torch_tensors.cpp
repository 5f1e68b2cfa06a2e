#include "bindings/torch_tensors.h"

#include <algorithm>
#include <string>

namespace preflash {

namespace py = pybind11;

namespace {

constexpr std::uint32_t kExchangeMajor = 1;

const dlpack::ExchangeApi* find_exchange(const py::object& tensor_type) {
  if (!py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return nullptr;
  const py::object held = tensor_type.attr("__dlpack_c_exchange_api__");
  const void* found = PyCapsule_GetPointer(held.ptr(), "dlpack_exchange_api");
  if (found == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  const auto* api = static_cast<const dlpack::ExchangeApi*>(found);
  while (api != nullptr && api->major != kExchangeMajor) api = api->previous;
  if (api == nullptr || api->read == nullptr || api->current_stream == nullptr) return nullptr;
  return api;
}

// The result of a call that fails only by the caller's error.
py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool is_true(const py::object& value) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

}  // namespace

Torch::Torch(const py::object& tensor_type, const py::object& is_tracing,
             const py::object& is_grad_enabled, const py::object& autograd)
    : exchange_(find_exchange(tensor_type)),
      tensor_type_(tensor_type),
      is_tracing_(is_tracing),
      is_grad_enabled_(is_grad_enabled),
      forward_ad_(autograd.attr("forward_ad")),
      increment_version_(autograd.attr("graph").attr("increment_version")),
      requires_grad_(py::str("requires_grad")),
      current_level_(py::str("_current_level")),
      is_neg_(py::getattr(tensor_type, "is_neg", py::none())) {}

std::optional<dlpack::Tensor> Torch::read(PyObject* object) const {
  if (exchange_ == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(object)) != tensor_type_.ptr()) {
    return {};
  }
  dlpack::Tensor tensor;
  if (exchange_->read(object, &tensor) != 0) {
    PyErr_Clear();
    return {};
  }
  return tensor;
}

bool Torch::is_negative(PyObject* tensor) const {
  return is_true(checked(PyObject_Vectorcall(is_neg_.ptr(), &tensor, 1, nullptr)));
}

SeenTensor Torch::see(PyObject* object) const {
  SeenTensor seen;
  TensorFacts& facts = seen.facts;
  if (const auto tensor = read(object); tensor && tensor->ndim <= TensorFacts::kMaxDims) {
    const auto& [code, bits, lanes] = tensor->dtype;
    facts.dtype = code | std::uint64_t{bits} << 8 | std::uint64_t{lanes} << 16;
    facts.device = static_cast<std::uint64_t>(tensor->device.type) << 32 |
                   static_cast<std::uint32_t>(tensor->device.id);
    facts.ndim = tensor->ndim;
    facts.negative = is_negative(object);
    std::copy_n(tensor->shape, facts.ndim, facts.shape.begin());
    std::copy_n(tensor->strides, facts.ndim, facts.strides.begin());
    seen.address = tensor->address();
    return seen;
  }
  const py::handle tensor(object);
  const py::tuple shape = tensor.attr("shape"), strides = tensor.attr("stride")();
  if (shape.size() > TensorFacts::kMaxDims || shape.size() != strides.size()) {
    throw py::value_error("a tensor of " + std::to_string(shape.size()) + " dimensions");
  }
  facts.dtype = reinterpret_cast<Address>(tensor.attr("dtype").ptr());  // each is one object
  facts.device = static_cast<std::uint64_t>(py::hash(tensor.attr("device")));
  facts.ndim = static_cast<std::int32_t>(shape.size());
  facts.negative = is_true(tensor.attr("is_neg")());
  for (int i = 0; i < facts.ndim; ++i) {
    facts.shape[i] = shape[i].cast<std::int64_t>();
    facts.strides[i] = strides[i].cast<std::int64_t>();
  }
  seen.address = tensor.attr("data_ptr")().cast<Address>();
  return seen;
}

Address Torch::address_of(PyObject* object) const {
  if (const auto tensor = read(object)) return tensor->address();
  return py::handle(object).attr("data_ptr")().cast<Address>();
}

std::optional<void*> Torch::current_stream(int device) const {
  void* stream = nullptr;
  if (exchange_ == nullptr) return {};
  if (exchange_->current_stream(dlpack::kCuda, device, &stream) != 0) {
    PyErr_Clear();
    return {};
  }
  return stream;
}

bool Torch::records(std::span<PyObject* const> tensors) const {
  if (is_true(checked(PyObject_CallNoArgs(is_tracing_.ptr())))) return true;
  const py::object level = checked(PyObject_GetAttr(forward_ad_.ptr(), current_level_.ptr()));
  const long differentiated = PyLong_AsLong(level.ptr());
  if (differentiated == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (differentiated >= 0) return true;
  if (!is_true(checked(PyObject_CallNoArgs(is_grad_enabled_.ptr())))) return false;
  return std::ranges::any_of(tensors, [&](PyObject* tensor) {
    return is_true(checked(PyObject_GetAttr(tensor, requires_grad_.ptr())));
  });
}

void Torch::tell_written(PyObject* tensor) const {
  checked(PyObject_CallOneArg(increment_version_.ptr(), tensor));
}

void bind_torch(py::module_& m) {
  py::class_<Torch, std::shared_ptr<Torch>>(m, "Torch")
      .def(py::init<const py::object&, const py::object&, const py::object&, const py::object&>(),
           py::arg("tensor_type"), py::arg("is_tracing"), py::arg("is_grad_enabled"),
           py::arg("autograd"));
}

}  // namespace preflash
