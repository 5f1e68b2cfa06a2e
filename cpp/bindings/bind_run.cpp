// Runs for Python. The wrappers call this for every layer, so it is a CPython function without
// pybind11's dispatcher.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
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

// The state of a callable that bound_run() made.
Shared bound_of(py::handle callable) {
  if (!PyCFunction_Check(callable.ptr()) ||
      PyCFunction_GET_FUNCTION(callable.ptr()) != run_definition.ml_meth) {
    throw py::type_error("not a bound run");
  }
  return state_of<Shared>(PyCFunction_GET_SELF(callable.ptr()));
}

// (run, its arguments)
PyObject* check_run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count == 0) return PyErr_Format(PyExc_TypeError, "check_run takes a bound run");
  try {
    bound_of(given[0])->check(given + 1, count - 1);
    Py_RETURN_NONE;
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef check_definition =
    fast_definition("check_run", &check_run, "The checks of a bound run alone.");

// (place, plan, settings, context)
PyObject* bound_run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "bound_run takes 4 arguments");
  try {
    auto bound = std::make_shared<BoundRun>(
        argument<std::shared_ptr<Place>>(given, 0), argument<std::shared_ptr<Plan>>(given, 1),
        argument<std::shared_ptr<RunSettings>>(given, 2), argument<py::tuple>(given, 3));
    return fast_callable(run_definition, std::move(bound)).release().ptr();
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef bound_definition = fast_definition(
    "bound_run", &bound_run, "The function that runs a placed plan, for any layer.");

// Adds a copy of an int32 array into the beginning of a buffer, unless the array is that beginning.
// copy: the buffer, the array, and the most elements. Arrays that are not contiguous and
// one-dimensional on the host are copied by Python.
void add_copy(const BoundRun& run, py::handle copy, std::vector<HostCopy>* copies) {
  if (!PyTuple_Check(copy.ptr()) || PyTuple_GET_SIZE(copy.ptr()) != 3) {
    throw py::type_error("a copy is (buffer, array, most)");
  }
  PyObject* const* const items = &PyTuple_GET_ITEM(copy.ptr(), 0);
  const auto to = run.torch().read(items[0]), from = run.torch().read(items[1]);
  const bool flat = to && from && from->ndim == 1 && (from->strides[0] == 1 || from->shape[0] <= 1);
  if (flat && from->device == to->device && from->address() == to->address()) return;
  if (!flat || from->device.type != dlpack::kCpu) {
    run.functions().copy(py::handle(items[0]), py::handle(items[1]), py::handle(items[2]));
    return;
  }
  const std::int64_t elements = std::min(from->shape[0], argument<std::int64_t>(items, 2));
  copies->push_back({.to = pointer<void>(to->address()),
                     .from = pointer<const void>(from->address()),
                     .bytes = static_cast<std::size_t>(elements) * sizeof(std::int32_t)});
}

// (runs, stream, copies, then). NOTE: the caller's state changes in `then`. No signal handler may
// run and raise after the work list has arrived in memory that the old state may still own and
// before the new state describes it. So `then` must not run Python bytecode, between which handlers
// run.
PyObject* upload(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "upload takes 4 arguments");
  try {
    std::vector<Shared> runs;
    for (const py::handle run : argument<py::sequence>(given, 0)) runs.push_back(bound_of(run));
    if (runs.empty()) throw std::invalid_argument("there is no plan to upload");
    std::vector<HostCopy> copies;
    for (const py::handle copy : argument<py::sequence>(given, 2)) {
      add_copy(*runs.front(), copy, &copies);
    }
    BoundRun::upload(runs, pointer<void>(argument<Address>(given, 1)), std::move(copies));
    if (given[3] == Py_None) Py_RETURN_NONE;
    return PyObject_CallNoArgs(given[3]);
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef upload_definition =
    fast_definition("upload", &upload, "Starts the copies of work lists to the device.");

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
  py::class_<RunSettings, std::shared_ptr<RunSettings>>(m, "RunSettings")
      .def(py::init([](std::shared_ptr<RunFunctions> functions, py::object float_workspace,
                       py::object num_threads, py::object launched_by) {
             auto settings = std::make_shared<RunSettings>();
             settings->functions = std::move(functions);
             settings->float_workspace = std::move(float_workspace);
             settings->num_threads = std::move(num_threads);
             settings->launched_by = std::move(launched_by);
             return settings;
           }),
           py::arg("functions"), py::arg("float_workspace"), py::arg("num_threads"),
           py::arg("launched_by"));
  m.def("last_variant", &BoundRun::last_variant);
  m.def("may_overlap", &tensors_may_overlap, py::arg("a"), py::arg("b"));
  py::class_<RunFunctions, std::shared_ptr<RunFunctions>>(m, "RunFunctions")
      .def(py::init(
               [](py::object check, py::object refuse, py::object stream_changed, py::object copy) {
                 return std::make_shared<RunFunctions>(
                     RunFunctions{.check = std::move(check),
                                  .refuse = std::move(refuse),
                                  .stream_changed = std::move(stream_changed),
                                  .copy = std::move(copy)});
               }),
           py::arg("check"), py::arg("refuse"), py::arg("stream_changed"), py::arg("copy"));
  add_functions(m, {&bound_definition, &check_definition, &upload_definition});
}

}  // namespace preflash
