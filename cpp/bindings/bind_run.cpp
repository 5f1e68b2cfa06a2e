// Runs for Python. One of the wrappers comes through here for every layer, so that its call is one
// of CPython's own.
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

PyObject* check(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  try {
    state_of<Shared>(self)->check(given, count);
    Py_RETURN_NONE;
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef run_definition = fast_definition("run", &run, "Starts a launch for these tensors.");
PyMethodDef check_definition = fast_definition("check", &check, "The checks of run() alone.");

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
  m.def("may_overlap", &tensors_may_overlap, py::arg("a"), py::arg("b"));
  py::class_<BoundRun, Shared>(m, "BoundRun")
      .def(py::init([](std::shared_ptr<Place> place, const Plan& plan, const py::object& partials,
                       const py::sequence& masks, py::object check, py::object refuse,
                       py::object stream, py::object stream_changed, py::object num_threads,
                       py::object launched_by) {
             return std::make_shared<BoundRun>(
                 std::move(place), plan, partials, masks,
                 RunFunctions{.check = std::move(check),
                              .refuse = std::move(refuse),
                              .stream = std::move(stream),
                              .stream_changed = std::move(stream_changed),
                              .num_threads = std::move(num_threads),
                              .launched_by = std::move(launched_by)});
           }),
           py::arg("place"), py::arg("plan"), py::arg("partials"), py::arg("masks"),
           py::arg("check"), py::arg("refuse"), py::arg("stream"), py::arg("stream_changed"),
           py::arg("num_threads"), py::arg("launched_by"))
      .def(
          "hold",
          [](BoundRun& self, std::string name, py::object tensor, Address address,
             std::int64_t bytes) {
            self.hold(std::move(name), std::move(tensor), {.address = address, .bytes = bytes});
          },
          py::arg("name"), py::arg("tensor"), py::arg("address"), py::arg("bytes"))
      .def_property_readonly("run",
                             [](const Shared& self) { return fast_callable(run_definition, self); })
      .def_property_readonly(
          "check", [](const Shared& self) { return fast_callable(check_definition, self); });
}

}  // namespace preflash
