#include "bindings/segment_inputs.h"

#include <algorithm>
#include <iterator>
#include <numbers>
#include <span>

namespace preflash {

namespace py = pybind11;

namespace {

// Items of a tuple; throws pybind11's type_error unless it is a tuple of `count`.
std::span<PyObject* const> items_of(PyObject* tuple, Py_ssize_t count) {
  if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != count) {
    refuse_arguments();
  }
  return {&PyTuple_GET_ITEM(tuple, 0), static_cast<std::size_t>(count)};
}

float float_of(PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return static_cast<float>(number);
}

// Factor for base-2 logarithms. base: a name (checked elsewhere), or the factor itself.
float lse_scale_of(PyObject* base) {
  if (!PyUnicode_Check(base)) return float_of(base);
  return PyUnicode_CompareWithASCIIString(base, "ln") == 0 ? std::numbers::ln2_v<float> : 1.0f;
}

char first_letter(PyObject* name) {
  if (!PyUnicode_Check(name) || PyUnicode_GET_LENGTH(name) == 0) return '?';
  return static_cast<char>(PyUnicode_READ_CHAR(name, 0));
}

PyObject* null_if_none(PyObject* value) { return value == Py_None ? nullptr : value; }

}  // namespace

void refuse_arguments() {
  throw py::type_error("a run takes q, kv, scales, outputs and memory of each segment");
}

SegmentInputs::SegmentInputs(PyObject* const* arguments) : q(arguments[0]) {
  PyObject* const kv = arguments[1];
  if (PyTuple_Check(kv) || PyList_Check(kv)) {
    pair = py::reinterpret_steal<py::object>(PySequence_Tuple(kv));
  }
  one_cache = !pair || PyTuple_GET_SIZE(pair.ptr()) != 2;
  k = one_cache ? kv : PyTuple_GET_ITEM(pair.ptr(), 0);
  v = one_cache ? kv : PyTuple_GET_ITEM(pair.ptr(), 1);
  const auto scales = items_of(arguments[2], 2);
  sm_scale = float_of(scales[0]);
  out_scale = float_of(scales[1]);
  const auto outputs = items_of(arguments[3], 5);
  out = null_if_none(outputs[0]);
  lse = null_if_none(outputs[1]);
  const int truth = PyObject_IsTrue(outputs[2]);
  if (truth < 0) throw py::error_already_set();
  return_lse = truth != 0;
  lse_scale = lse_scale_of(outputs[3]);
  lse_layout = first_letter(outputs[4]);
  if (arguments[4] == Py_None) return;
  if (PyTuple_Check(arguments[4])) {
    heads = items_of(arguments[4], SegmentFacts::kHeadTensorCount);
  } else {
    memory = py::handle(arguments[4]).cast<const RunMemory*>();
  }
}

TensorDescs::TensorDescs(const Torch& torch, const SegmentInputs& given) {
  const auto see = [&](PyObject* tensor, TensorFacts* facts) {
    const SeenTensor seen = torch.see(tensor);
    *facts = seen.facts;
    return seen.address;
  };
  facts.one_cache = given.one_cache;
  if (given.wants_lse()) facts.lse_layout = given.lse_layout;
  q = see(given.q, &facts.q);
  k = see(given.k, &facts.k);
  v = given.one_cache ? k : see(given.v, &facts.v);
  if (given.out != nullptr) out = see(given.out, &facts.out);
  if (given.lse != nullptr) see_lse(torch, given.lse);
  for (std::size_t i = 0; i < given.heads.size(); ++i) {
    if (given.heads[i] != Py_None) heads[i] = see(given.heads[i], &facts.heads[i]);
  }
}

void TensorDescs::add_heads(RunExtras* extras) const {
  static_assert(std::size(kHeadTensors) == SegmentFacts::kHeadTensorCount);
  for (std::size_t i = 0; i < heads.size(); ++i) {
    if (heads[i] != 0) extras->*kHeadTensors[i].address = pointer<const float>(heads[i]);
  }
}

void TensorDescs::see_lse(const Torch& torch, PyObject* tensor) {
  const SeenTensor seen = torch.see(tensor);
  facts.lse = seen.facts;
  lse = seen.address;
}

bool TensorDescs::lse_is_unbacked() const {
  const auto empty = [](const TensorFacts& tensor) {
    return std::ranges::count(tensor.shape.begin(), tensor.shape.begin() + tensor.ndim, 0) > 0;
  };
  return facts.lse.ndim >= 0 && lse == 0 && !empty(facts.lse);
}

}  // namespace preflash
