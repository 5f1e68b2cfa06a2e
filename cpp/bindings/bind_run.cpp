// Runs for Python. The wrappers call this for every layer, so it is a CPython function without
// pybind11's dispatcher.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/bound_run.h"
#include "bindings/fast_call.h"
#include "core/memory_span.h"

namespace preflash {
namespace {

namespace py = pybind11;

using Shared = std::shared_ptr<BoundRun>;

PyObject* run(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  try {
    return state_of<Shared>(self)->run(given, count).release().ptr();
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef run_definition = fast_definition("run", &run, "Starts a launch for these tensors.");

// (run, its arguments)
PyObject* check_run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count == 0 || !PyCFunction_Check(given[0]) ||
      PyCFunction_GET_FUNCTION(given[0]) != run_definition.ml_meth) {
    return PyErr_Format(PyExc_TypeError, "check_run takes a bound run and its arguments");
  }
  try {
    state_of<Shared>(PyCFunction_GET_SELF(given[0]))->check(given + 1, count - 1);
    Py_RETURN_NONE;
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef check_definition =
    fast_definition("check_run", &check_run, "The checks of a bound run alone.");

// (place, plan, partials, masks, largest_pages, held, known, functions, context, num_threads,
// launched_by, kv_lens)
PyObject* bound_run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 12) return PyErr_Format(PyExc_TypeError, "bound_run takes 12 arguments");
  const auto object = [given](int i) { return py::reinterpret_borrow<py::object>(given[i]); };
  try {
    auto place = object(0).cast<std::shared_ptr<Place>>();
    std::vector<RunMemory> memory;
    const auto masks = object(3).cast<py::list>(), kv_lens = object(11).cast<py::list>();
    for (std::size_t s = 0; s < masks.size(); ++s) {
      memory.push_back(RunMemory::of_plan(*place->torch, object(2), masks[s], kv_lens[s]));
    }
    auto bound =
        std::make_shared<BoundRun>(std::move(place), object(1).cast<std::shared_ptr<Plan>>(),
                                   std::move(memory), object(4).cast<std::vector<std::int64_t>>(),
                                   object(6).cast<std::shared_ptr<KnownTensors>>(),
                                   object(7).cast<std::shared_ptr<RunFunctions>>(), object(8),
                                   Starting{.num_threads = object(9), .launched_by = object(10)});
    for (const py::handle held : object(5)) {
      auto [name, tensor, bytes] = held.cast<std::tuple<std::string, py::object, std::int64_t>>();
      bound->hold(name, tensor, bytes);
    }
    return fast_callable(run_definition, std::move(bound)).release().ptr();
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef bound_definition = fast_definition(
    "bound_run", &bound_run, "The function that runs a placed plan, for any layer.");

// Address, (stride, count) of the dimensions before the last, and the bytes of a row.
using Strided =
    std::tuple<Address, std::vector<std::pair<std::int64_t, std::int64_t>>, std::int64_t>;

MemorySpan span_of(const Strided& tensor) {
  const auto& [address, dimensions, row_bytes] = tensor;
  MemorySpan span{.row_bytes = row_bytes};
  if (dimensions.size() > span.dimensions.size())
    throw std::invalid_argument("too many dimensions");
  for (std::size_t i = 0; i < dimensions.size(); ++i) {
    span.dimensions[i] = {.stride = dimensions[i].first, .count = dimensions[i].second};
  }
  return span;
}

bool tensors_may_overlap(const Strided& a, const Strided& b) {
  return may_overlap(pointer<void>(std::get<0>(a)), span_of(a), pointer<void>(std::get<0>(b)),
                     span_of(b));
}

}  // namespace

void bind_run(py::module_& m) {
  py::class_<KnownTensors, std::shared_ptr<KnownTensors>>(m, "KnownTensors").def(py::init());
  m.def("last_variant", &BoundRun::last_variant);
  m.def("may_overlap", &tensors_may_overlap, py::arg("a"), py::arg("b"));
  py::class_<RunFunctions, std::shared_ptr<RunFunctions>>(m, "RunFunctions")
      .def(py::init([](py::object check, py::object refuse, py::object stream,
                       py::object stream_changed) {
             return std::make_shared<RunFunctions>(
                 RunFunctions{.check = std::move(check),
                              .refuse = std::move(refuse),
                              .stream = std::move(stream),
                              .stream_changed = std::move(stream_changed)});
           }),
           py::arg("check"), py::arg("refuse"), py::arg("stream"), py::arg("stream_changed"));
  add_functions(m, {&bound_definition, &check_definition});
}

}  // namespace preflash
