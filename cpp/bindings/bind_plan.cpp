#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/fast_call.h"
#include "bindings/plan_buffer.h"

namespace preflash {
namespace {

namespace py = pybind11;

#include "bindings/bind_options.inl"

std::size_t hash_of(const AttentionOptions& options) {
  std::size_t hash = 0;
  for_each_option([&](const char*, auto option) {
    const auto& value = option(options);
    hash = 31 * hash + std::hash<std::remove_cvref_t<decltype(value)>>{}(value);
  });
  return hash;
}

// A copy in which the named options have other values.
AttentionOptions replace(AttentionOptions options, const py::kwargs& changes) {
  for (const auto& [key, change] : changes) {
    const auto wanted = key.cast<std::string>();
    bool found = false;
    for_each_option([&, value = change](const char* name, auto option) {
      if (wanted != name) return;
      found = true;
      auto& field = option(options);
      try {
        field = value.template cast<std::remove_cvref_t<decltype(field)>>();
      } catch (const py::cast_error&) {
        throw py::type_error(wanted + " cannot be " + py::repr(value).template cast<std::string>());
      }
    });
    if (!found) throw py::type_error("AttentionOptions has no option named " + wanted);
  }
  return options;
}

void bind_options(py::module_& m) {
  py::enum_<Prepass>(m, "Prepass")
      .value("auto", Prepass::kAuto)
      .value("never", Prepass::kNever)
      .value("always", Prepass::kAlways);
  py::class_<AttentionOptions> options(m, "AttentionOptions");
  for_each_option([&](const char* name, auto option) {
    options.def_property_readonly(name,
                                  [option](const AttentionOptions& self) { return option(self); });
  });
  options.def(py::self == py::self)
      .def("__hash__", &hash_of)
      .def("replace", &replace)
      .def(py::init([](const py::kwargs& given) { return replace({}, given); }));
}

std::shared_ptr<Plan> make_plan(Family family, int device, const PerSegment<PlanRequest>& requests,
                                std::int64_t float_workspace_bytes) {
  py::gil_scoped_release release;  // of millions of items it takes seconds
  return std::make_shared<Plan>(family, device, requests, float_workspace_bytes);
}

// (options, batch, graph_max_rows, graph_mask_bytes)
PlanRequest plan_request(py::handle given) {
  if (!PyTuple_Check(given.ptr()) || PyTuple_GET_SIZE(given.ptr()) != 4) {
    throw py::type_error("a segment is (options, batch, graph_max_rows, graph_mask_bytes)");
  }
  PyObject* const* const items = &PyTuple_GET_ITEM(given.ptr(), 0);
  return {.options = argument<const AttentionOptions&>(items, 0),
          .batch = argument<std::shared_ptr<Batch>>(items, 1),
          .graph_max_rows = argument<std::int32_t>(items, 2),
          .graph_mask_bytes = argument<std::int64_t>(items, 3)};
}

// (family, device, segments, float_workspace_bytes)
PyObject* plan(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "plan takes 4 arguments");
  try {
    const auto requests = per_segment<PlanRequest>(argument<py::sequence>(given, 2), &plan_request);
    return py::cast(make_plan(argument<Family>(given, 0), argument<int>(given, 1), requests,
                              argument<std::int64_t>(given, 3)))
        .release()
        .ptr();
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef plan_definition = fast_definition("plan", &plan, "A plan of one launch.");

void bind_plans(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def_property_readonly("num_segments",
                             [](const Plan& plan) { return plan.segments().size(); })
      .def_property_readonly("id", &Plan::id)
      .def_property_readonly("int_bytes", &Plan::int_bytes)
      .def_property_readonly("float_bytes", &Plan::float_bytes)
      .def_property_readonly("has_prepass", &Plan::has_prepass)
      .def_property_readonly("num_items",
                             [](const Plan& plan) { return plan.total_sizes().num_items; })
      .def_property_readonly("num_rounds", [](const Plan& plan) { return plan.rounds().size(); })
      .def_property_readonly("num_ctas", [](const Plan& plan) { return plan.sizes().num_ctas; })
      .def_property_readonly("num_merges",
                             [](const Plan& plan) { return plan.total_sizes().num_merges(); })
      .def_property_readonly(
          "mask_tile_words",
          [](const Plan& plan) { return plan.sizes().segments[0].num_mask_tile_words; })
      .def_property_readonly("num_kv_tiles",
                             [](const Plan& plan) { return plan.total_sizes().num_kv_tiles; })
      .def_property_readonly("makespan_kv_tiles",
                             [](const Plan& plan) { return plan.total_sizes().makespan_kv_tiles; });
}

void bind_places(py::module_& m) {
  py::class_<Uploader, std::shared_ptr<Uploader>>(m, "Uploader")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("device", &Uploader::device);
  py::class_<RequestLengths>(m, "RequestLengths")
      .def(py::init([](Address qo_indptr, Address kv_indptr, Address kv_lens, int table_stride) {
             return RequestLengths{.qo_indptr = pointer<const std::int32_t>(qo_indptr),
                                   .kv_indptr = pointer<const std::int32_t>(kv_indptr),
                                   .kv_lens = pointer<const std::int32_t>(kv_lens),
                                   .table_stride = table_stride};
           }),
           py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_lens"), py::arg("table_stride"));
  py::class_<PlanBuffer, std::shared_ptr<PlanBuffer>>(m, "PlanBuffer")
      .def_readonly("buffer", &PlanBuffer::buffer)
      .def_property(
          "shared", [](const PlanBuffer& place) { return place.shared.load(); },
          [](PlanBuffer& place, bool shared) { place.shared = shared; })
      .def_property_readonly("is_captured",
                             [](const PlanBuffer& place) { return place.held() != nullptr; })
      .def("check_captured", &PlanBuffer::check_captured, py::arg("segment"), py::arg("batch"),
           py::arg("largest_page"))
      .def(
          "set_lengths",
          [](const PlanBuffer& place, RequestLengths lengths, std::int64_t qo_tokens,
             std::int64_t kv_tokens, Address stream) {
            lengths.qo_tokens = qo_tokens;
            lengths.kv_tokens = kv_tokens;
            place.set_lengths(lengths, {.device = place.device(), .stream = pointer<void>(stream)});
          },
          py::arg("lengths"), py::arg("qo_tokens"), py::arg("kv_tokens"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "arrive_before",
          [](const PlanBuffer& place, Address stream) {
            place.arrive_before(pointer<void>(stream));
          },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_options(m);
  bind_plans(m);
  bind_places(m);
  add_functions(m, {&plan_definition});
}

}  // namespace preflash
