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
#include "bindings/execution_plan.h"
#include "bindings/fast_call.h"
#include "core/memory_span.h"

namespace preflash {
namespace {

namespace py = pybind11;

using Shared = std::shared_ptr<ExecutionPlan>;

// variant(q, kv, scales, outputs, memory), once for each segment.
PyObject* run(PyObject* self, PyObject* arguments, PyObject* /*by_name*/) {
  try {
    return py::handle(self)
        .cast<ExecutionPlan&>()
        .run(&PyTuple_GET_ITEM(arguments, 0), PyTuple_GET_SIZE(arguments))
        .release()
        .ptr();
  } catch (...) {
    return raise(std::current_exception());
  }
}

void make_callable(PyHeapTypeObject* heap_type) { heap_type->ht_type.tp_call = &run; }

// (buffer, array, most)
ArrayForBuffer array_for_buffer(py::handle given) {
  if (!PyTuple_Check(given.ptr()) || PyTuple_GET_SIZE(given.ptr()) != 3) {
    throw py::type_error("a copy is (buffer, array, most)");
  }
  PyObject* const* const items = &PyTuple_GET_ITEM(given.ptr(), 0);
  return {.buffer = items[0], .array = items[1], .most = argument<std::int64_t>(items, 2)};
}

// (variants, stream, copies, then). NOTE: the caller's state changes in `then`. No signal handler
// may run and raise after the work list has arrived in memory that the old state may still own and
// before the new state describes it. So `then` must not run Python bytecode, between which handlers
// run.
PyObject* upload(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "upload takes 4 arguments");
  try {
    std::vector<Shared> variants;
    for (const py::handle one : argument<py::sequence>(given, 0)) {
      variants.push_back(one.cast<Shared>());
    }
    if (variants.empty()) throw std::invalid_argument("there is no plan to upload");
    std::vector<HostCopy> copies;
    for (const py::handle copy : argument<py::sequence>(given, 2)) {
      add_copy(*variants.front()->workspace(), array_for_buffer(copy), &copies);
    }
    ExecutionPlan::upload(variants, pointer<void>(argument<Address>(given, 1)), std::move(copies));
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
  py::class_<ExecutionPlan, Shared>(m, "ExecutionPlan", py::custom_type_setup(&make_callable))
      .def(py::init<py::object, std::shared_ptr<const Plan>, py::tuple>(), py::arg("backend"),
           py::arg("plan"), py::arg("requests"))
      .def("allocate_in", &ExecutionPlan::allocate_in, py::arg("workspace"),
           py::arg("where") = nullptr)
      .def("check_run",
           [](ExecutionPlan& variant, const py::args& run) {
             variant.check(&PyTuple_GET_ITEM(run.ptr(), 0), PyTuple_GET_SIZE(run.ptr()));
           })
      .def_readwrite("before_run", &ExecutionPlan::before_run)
      .def_property_readonly("backend", &ExecutionPlan::backend)
      .def_property_readonly("plan", [](const ExecutionPlan& variant) { return variant.plan(); })
      .def_property_readonly("plan_buffer", &ExecutionPlan::plan_buffer)
      .def_property_readonly("workspace", &ExecutionPlan::workspace)
      .def_property_readonly("device_stream",
                             [](const ExecutionPlan& variant) {
                               return variant.workspace()->device_stream().python();
                             })
      .def_property_readonly("id",
                             [](const ExecutionPlan& variant) { return variant.plan()->id(); })
      .def_property("requests", &ExecutionPlan::requests, &ExecutionPlan::set_requests)
      .def_property_readonly("request",
                             [](const ExecutionPlan& variant) { return variant.requests()[0]; })
      .def_property(
          "shared",
          [](const ExecutionPlan& variant) { return variant.plan_buffer()->shared.load(); },
          [](ExecutionPlan& variant, bool shared) { variant.plan_buffer()->shared = shared; });
  m.def(
      "order_behind_users",
      [](const std::vector<Shared>& ran, const std::vector<std::shared_ptr<PlanBuffer>>& captured,
         const Workspace& workspace) {
        std::vector<std::shared_ptr<Buffer>> buffers;
        for (const auto& one : captured) buffers.push_back(one->buffer);
        for (const auto& variant : ran) {
          buffers.insert(buffers.end(), variant->buffers().begin(), variant->buffers().end());
        }
        order_behind_users(buffers, workspace.device_stream());
      },
      py::arg("ran"), py::arg("captured"), py::arg("workspace"));
  m.def("last_variant", &ExecutionPlan::last_variant);
  m.def("may_overlap", &tensors_may_overlap, py::arg("a"), py::arg("b"));
  add_functions(m, {&upload_definition});
}

}  // namespace preflash
