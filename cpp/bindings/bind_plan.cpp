#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/device_plan.h"

namespace preflash {
namespace {

namespace py = pybind11;

// Visits every option with its name in Python and an accessor.
template <class Visit>
void for_each_option(Visit&& visit) {
  visit("num_qo_heads", [](auto& options) -> auto& { return options.num_qo_heads; });
  visit("num_kv_heads", [](auto& options) -> auto& { return options.num_kv_heads; });
  visit("head_dim_qk", [](auto& options) -> auto& { return options.head_dim_qk; });
  visit("head_dim_vo", [](auto& options) -> auto& { return options.head_dim_vo; });
  visit("q_dtype", [](auto& options) -> auto& { return options.q_dtype; });
  visit("kv_dtype", [](auto& options) -> auto& { return options.kv_dtype; });
  visit("o_dtype", [](auto& options) -> auto& { return options.o_dtype; });
  visit("causal", [](auto& options) -> auto& { return options.causal; });
  visit("window_left", [](auto& options) -> auto& { return options.window_left; });
  visit("chunk_size", [](auto& options) -> auto& { return options.chunk_size; });
  visit("mask", [](auto& options) -> auto& { return options.mask; });
  visit("position", [](auto& options) -> auto& { return options.position; });
  visit("staging", [](auto& options) -> auto& { return options.staging; });
  visit("rope_scale", [](auto& options) -> auto& { return options.rope.scale; });
  visit("rope_theta", [](auto& options) -> auto& { return options.rope.theta; });
  visit("soft_cap", [](auto& options) -> auto& { return options.soft_cap; });
  visit("fixed_split_size", [](auto& options) -> auto& { return options.split.fixed_split_size; });
  visit("disable_split", [](auto& options) -> auto& { return options.split.disable; });
  visit("skip_factor", [](auto& options) -> auto& { return options.skip_factor; });
}

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

RunExtras extras_of(Address mask_bits, Address mask_classes, const py::kwargs& per_head) {
  RunExtras extras{.mask_bits = pointer<const std::uint8_t>(mask_bits),
                   .mask_classes = pointer<std::uint32_t>(mask_classes)};
  for (const auto& [key, address] : per_head) {
    const auto name = key.cast<std::string>();
    const auto* tensor = std::ranges::find(kHeadTensors, name, &HeadTensor::name);
    if (tensor == std::end(kHeadTensors)) {
      throw py::type_error("RunExtras has no tensor named " + name);
    }
    extras.*tensor->address = pointer<const float>(address.cast<Address>());
  }
  return extras;
}

void bind_options(py::module_& m) {
  py::enum_<Staging>(m, "Staging")
      .value("auto", Staging::kAuto)
      .value("never", Staging::kNever)
      .value("always", Staging::kAlways);
  py::class_<AttentionOptions> options(m, "AttentionOptions");
  for_each_option([&](const char* name, auto option) {
    options.def_property_readonly(name,
                                  [option](const AttentionOptions& self) { return option(self); });
  });
  options.def(py::self == py::self)
      .def("__hash__", &hash_of)
      .def("replace", &replace)
      .def(py::init([](int num_qo_heads, int num_kv_heads, int head_dim_qk, int head_dim_vo,
                       DType q_dtype, DType kv_dtype, DType o_dtype, bool causal, int window_left,
                       Mask mask, Position position, double rope_scale, double rope_theta,
                       float soft_cap, int fixed_split_size, bool disable_split, int chunk_size,
                       float skip_factor) {
             return AttentionOptions{
                 .num_qo_heads = num_qo_heads,
                 .num_kv_heads = num_kv_heads,
                 .head_dim_qk = head_dim_qk,
                 .head_dim_vo = head_dim_vo,
                 .q_dtype = q_dtype,
                 .kv_dtype = kv_dtype,
                 .o_dtype = o_dtype,
                 .causal = causal,
                 .window_left = window_left,
                 .chunk_size = chunk_size,
                 .mask = mask,
                 .position = position,
                 .rope = {.scale = rope_scale, .theta = rope_theta},
                 .soft_cap = soft_cap,
                 .split = {.fixed_split_size = fixed_split_size, .disable = disable_split},
                 .skip_factor = skip_factor};
           }),
           py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
           py::arg("head_dim_vo"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("o_dtype"),
           py::arg("causal"), py::arg("window_left"), py::arg("mask"), py::arg("position"),
           py::arg("rope_scale"), py::arg("rope_theta"), py::arg("soft_cap"),
           py::arg("fixed_split_size"), py::arg("disable_split"), py::arg("chunk_size") = 0,
           py::arg("skip_factor") = 0.0f);
  py::class_<RunExtras>(m, "RunExtras")
      .def(py::init(&extras_of), py::arg("mask_bits") = 0, py::arg("mask_classes") = 0)
      .def_property_readonly("mask_bits", [](const RunExtras& extras) {
        return reinterpret_cast<Address>(extras.mask_bits);
      });
}

std::shared_ptr<Plan> make_plan(Family family, int device, const PerSegment<PlanRequest>& requests,
                                std::int64_t float_workspace_bytes) {
  py::gil_scoped_release release;  // of millions of items it takes seconds
  return std::make_shared<Plan>(family, device, requests, float_workspace_bytes);
}

PlanRequest plan_request(const py::handle& given) {
  auto [options, batch, graph_max_rows] =
      given.cast<std::tuple<AttentionOptions, std::shared_ptr<Batch>, std::int32_t>>();
  return {.options = options, .batch = std::move(batch), .graph_max_rows = graph_max_rows};
}

// A plan and where it goes.
using Placement = std::pair<std::shared_ptr<DevicePlan>, std::shared_ptr<Plan>>;

// NOTE: the state changes hands here, where no signal handler can run and raise between the work
// lists' arrival in memory that the old state may still own and the new state that describes them.
void write(const std::vector<Placement>& placements, const py::object& page_indices,
           Address mask_bits, Address stream, const py::object& owner, const py::object& state) {
  auto address = [](const py::handle& given) {
    return pointer<const std::int32_t>(given.cast<Address>());
  };
  Upload upload{.stream = pointer<void>(stream)};
  if (mask_bits != 0) upload.mask_bits = pointer<const std::uint8_t>(mask_bits);
  if (py::isinstance<py::int_>(page_indices)) {
    upload.page_indices = address(page_indices);
  } else {
    upload.page_indices = per_segment<const std::int32_t*>(page_indices, address);
  }
  {
    // Staging may be busy with an earlier copy.
    py::gil_scoped_release release;
    for (const auto& [place, plan] : placements) place->write(plan, upload);
  }
  if (!owner.is_none()) py::setattr(owner, "_state", state);
}

void bind_plans(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init([](Family family, int device, const AttentionOptions& options,
                       std::shared_ptr<Batch> batch, std::int64_t float_workspace_bytes,
                       std::int32_t graph_max_rows, std::int64_t graph_mask_bytes) {
             return make_plan(family, device,
                              PlanRequest{.options = options,
                                          .batch = std::move(batch),
                                          .graph_max_rows = graph_max_rows,
                                          .graph_mask_bytes = graph_mask_bytes},
                              float_workspace_bytes);
           }),
           py::arg("family"), py::arg("device"), py::arg("options"), py::arg("batch"),
           py::arg("float_workspace_bytes"), py::arg("graph_max_rows"),
           py::arg("graph_mask_bytes") = 0)
      .def_static(
          "of_segments",
          [](Family family, int device, const py::sequence& segments,
             std::int64_t float_workspace_bytes) {
            return make_plan(family, device, per_segment<PlanRequest>(segments, &plan_request),
                             float_workspace_bytes);
          },
          "One launch for (options, batch, graph_max_rows) of each segment.", py::arg("family"),
          py::arg("device"), py::arg("segments"), py::arg("float_workspace_bytes"))
      .def_property_readonly("num_segments",
                             [](const Plan& plan) { return plan.segments().size(); })
      .def_property_readonly("id", &Plan::id)
      .def_property_readonly("int_bytes", &Plan::int_bytes)
      .def_property_readonly("float_bytes", &Plan::float_bytes)
      .def_property_readonly("staged", &Plan::staged)
      .def_property_readonly("num_items", [](const Plan& plan) { return plan.sizes().num_items; })
      .def_property_readonly("num_ctas", [](const Plan& plan) { return plan.sizes().num_ctas; })
      .def_property_readonly("num_merges",
                             [](const Plan& plan) { return plan.sizes().num_merges(); })
      .def_property_readonly(
          "mask_class_words",
          [](const Plan& plan) { return plan.sizes().segments[0].num_class_words; })
      .def_property_readonly("num_kv_tiles",
                             [](const Plan& plan) { return plan.sizes().num_kv_tiles; })
      .def_property_readonly("makespan_kv_tiles",
                             [](const Plan& plan) { return plan.sizes().makespan_kv_tiles; });
}

void bind_places(py::module_& m) {
  py::class_<Uploader, std::shared_ptr<Uploader>>(m, "Uploader")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("device", &Uploader::device);
  py::class_<DevicePlan, std::shared_ptr<DevicePlan>>(m, "DevicePlan")
      .def(py::init([](std::shared_ptr<Uploader> uploader, Address memory, std::int64_t capacity) {
             return std::make_shared<DevicePlan>(std::move(uploader), pointer<void>(memory),
                                                 capacity);
           }),
           py::arg("uploader"), py::arg("memory"), py::arg("capacity"))
      .def(
          "set_lengths",
          [](const DevicePlan& place, Address qo_indptr, Address kv_indptr, Address kv_lens,
             int table_stride, std::int64_t qo_tokens, std::int64_t kv_tokens, Address stream) {
            place.set_lengths({.qo_indptr = pointer<const std::int32_t>(qo_indptr),
                               .kv_indptr = pointer<const std::int32_t>(kv_indptr),
                               .kv_lens = pointer<const std::int32_t>(kv_lens),
                               .table_stride = table_stride,
                               .qo_tokens = qo_tokens,
                               .kv_tokens = kv_tokens},
                              {.device = place.device(), .stream = pointer<void>(stream)});
          },
          py::arg("qo_indptr"), py::arg("kv_indptr"), py::arg("kv_lens"), py::arg("table_stride"),
          py::arg("qo_tokens"), py::arg("kv_tokens"), py::arg("stream"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "page_indices",
          [](const DevicePlan& place, int segment) {
            return reinterpret_cast<Address>(place.page_indices(segment));
          },
          py::arg("segment"))
      .def(
          "arrive_before",
          [](const DevicePlan& place, Address stream) {
            place.arrive_before(pointer<void>(stream));
          },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_options(m);
  bind_plans(m);
  bind_places(m);
  m.def("write_plans", &write, py::arg("placements"), py::arg("page_indices"), py::arg("mask_bits"),
        py::arg("stream"), py::arg("owner"), py::arg("state"));
}

}  // namespace preflash
