#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/launch.h"
#include "cpu/interrupt.h"

namespace preflash {
namespace {

namespace py = pybind11;

using TokenHead = std::array<std::int64_t, 2>;      // strides of [token, head]
using TokenHeadRows = std::array<std::int64_t, 3>;  // and the number of tokens
// Strides of [page, token, head], then the numbers of pages and of tokens in one.
using PageTokenHead = std::array<std::int64_t, 5>;

RowTensor row_tensor(const TokenHead& strides) {
  return {.stride_token = strides[0], .stride_head = strides[1]};
}

RowTensor row_tensor(const TokenHeadRows& numbers) {
  return {.stride_token = numbers[0], .stride_head = numbers[1], .num_tokens = numbers[2]};
}

KvTensor kv_tensor(const PageTokenHead& numbers) {
  return {.stride_page = numbers[0],
          .stride_token = numbers[1],
          .stride_head = numbers[2],
          .num_pages = numbers[3],
          .num_tokens = numbers[4]};
}

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
  visit("mask", [](auto& options) -> auto& { return options.mask; });
  visit("position", [](auto& options) -> auto& { return options.position; });
  visit("rope_scale", [](auto& options) -> auto& { return options.rope.scale; });
  visit("rope_theta", [](auto& options) -> auto& { return options.rope.theta; });
  visit("soft_cap", [](auto& options) -> auto& { return options.soft_cap; });
  visit("fixed_split_size", [](auto& options) -> auto& { return options.split.fixed_split_size; });
  visit("disable_split", [](auto& options) -> auto& { return options.split.disable; });
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

void bind_options(py::module_& m) {
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
                       float soft_cap, int fixed_split_size, bool disable_split) {
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
                 .mask = mask,
                 .position = position,
                 .rope = {.scale = rope_scale, .theta = rope_theta},
                 .soft_cap = soft_cap,
                 .split = {.fixed_split_size = fixed_split_size, .disable = disable_split}};
           }),
           py::arg("num_qo_heads"), py::arg("num_kv_heads"), py::arg("head_dim_qk"),
           py::arg("head_dim_vo"), py::arg("q_dtype"), py::arg("kv_dtype"), py::arg("o_dtype"),
           py::arg("causal"), py::arg("window_left"), py::arg("mask"), py::arg("position"),
           py::arg("rope_scale"), py::arg("rope_theta"), py::arg("soft_cap"),
           py::arg("fixed_split_size"), py::arg("disable_split"));
  py::class_<RunExtras>(m, "RunExtras")
      .def(py::init([](Address mask_bits, Address sinks, Address scale_q, Address scale_k,
                       Address scale_v) {
             return RunExtras{.mask_bits = pointer<const std::uint8_t>(mask_bits),
                              .sinks = pointer<const float>(sinks),
                              .scale_q = pointer<const float>(scale_q),
                              .scale_k = pointer<const float>(scale_k),
                              .scale_v = pointer<const float>(scale_v)};
           }),
           py::arg("mask_bits") = 0, py::arg("sinks") = 0, py::arg("scale_q") = 0,
           py::arg("scale_k") = 0, py::arg("scale_v") = 0);
}

std::shared_ptr<Plan> make_plan(Family family, int device, const PerSegment<PlanRequest>& requests,
                                std::int64_t float_workspace_bytes) {
  py::gil_scoped_release release;  // of millions of items it takes seconds
  return std::make_shared<Plan>(family, device, requests, float_workspace_bytes);
}

// One of a list's items for each segment.
template <class T, class Convert>
PerSegment<T> per_segment(const py::sequence& given, Convert&& convert) {
  if (given.empty() || given.size() > kMaxSegments) {
    throw py::value_error("a launch has one or two segments, not " + std::to_string(given.size()));
  }
  PerSegment<T> items;
  for (const py::handle item : given) items.add(convert(item));
  return items;
}

PlanRequest plan_request(const py::handle& given) {
  auto [options, batch, graph_max_rows] =
      given.cast<std::tuple<AttentionOptions, std::shared_ptr<Batch>, std::int32_t>>();
  return {.options = options, .batch = std::move(batch), .graph_max_rows = graph_max_rows};
}

RunTensors run_tensors(const TokenHeadRows& q, const PageTokenHead& k, const PageTokenHead& v,
                       const TokenHead& o, const TokenHead& lse) {
  return {.q = row_tensor(q),
          .k = kv_tensor(k),
          .v = kv_tensor(v),
          .o = row_tensor(o),
          .lse = {.stride_token = lse[0], .stride_head = lse[1]}};
}

// A plan and where it goes.
using Placement = std::pair<std::shared_ptr<DevicePlan>, std::shared_ptr<Plan>>;

// NOTE: the state changes hands here, where no signal handler can run and raise between the work
// lists' arrival in memory that the old state may still own and the new state that describes them.
void write(const std::vector<Placement>& placements, const py::object& page_indices, Address stream,
           const py::object& owner, const py::object& state) {
  auto address = [](const py::handle& given) {
    return pointer<const std::int32_t>(given.cast<Address>());
  };
  Upload upload{.stream = pointer<void>(stream)};
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

// extras: null, or those that this run has.
SegmentArguments segment_arguments(Address q, Address k, Address v, Address o, Address lse,
                                   float sm_scale, float out_scale, float lse_scale,
                                   const RunExtras* extras) {
  return {.q = pointer<const void>(q),
          .k = pointer<const void>(k),
          .v = pointer<const void>(v),
          .o = pointer<void>(o),
          .lse = pointer<float>(lse),
          .extras = extras == nullptr ? RunExtras{} : *extras,
          .sm_scale = sm_scale,
          .out_scale = out_scale,
          .lse_scale = lse_scale};
}

// Positional signatures: keyword matching would cost a third of the whole call.
bool run(Launch& launch, Address q, Address k, Address v, Address o, Address lse,
         Address float_workspace, Address stream, float sm_scale, float out_scale, float lse_scale,
         const RunExtras* extras) {
  return launch.run(
      {.segments = segment_arguments(q, k, v, o, lse, sm_scale, out_scale, lse_scale, extras),
       .float_workspace = pointer<void>(float_workspace),
       .stream = pointer<void>(stream)});
}

// Runs Python's signal handlers, as the interpreter does between bytecodes: Ctrl-C raises there.
bool signal_handler_raised() {
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// Without the interpreter's lock. Throws what a signal handler raised meanwhile.
bool run_interruptibly(Launch& launch, const RunArguments& arguments) {
  const cpu::InterruptScope interruptible(&signal_handler_raised);
  try {
    return launch.run(arguments);
  } catch (const std::runtime_error&) {
    py::gil_scoped_acquire acquire;
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    throw;
  }
}

// The same on so many threads of the CPU.
bool run_on_threads(Launch& launch, int num_threads, Address q, Address k, Address v, Address o,
                    Address lse, Address float_workspace, Address stream, float sm_scale,
                    float out_scale, float lse_scale, const RunExtras* extras) {
  check_num_threads(num_threads);
  return run_interruptibly(launch, {.segments = segment_arguments(q, k, v, o, lse, sm_scale,
                                                                  out_scale, lse_scale, extras),
                                    .float_workspace = pointer<void>(float_workspace),
                                    .stream = pointer<void>(stream),
                                    .num_threads = num_threads});
}

// One (q, k, v, o, lse, sm_scale, out_scale, lse_scale, extras) for each segment.
bool run_segments(Launch& launch, const py::sequence& segments, Address float_workspace,
                  Address stream, int num_threads) {
  check_num_threads(num_threads);
  RunArguments arguments{.segments = per_segment<SegmentArguments>(
                             segments,
                             [](const py::handle& given) {
                               using Row = std::tuple<Address, Address, Address, Address, Address,
                                                      float, float, float, const RunExtras*>;
                               return std::apply(&segment_arguments, given.cast<Row>());
                             }),
                         .float_workspace = pointer<void>(float_workspace),
                         .stream = pointer<void>(stream),
                         .num_threads = num_threads};
  py::gil_scoped_release release;
  return run_interruptibly(launch, arguments);
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_options(m);
  py::class_<Uploader, std::shared_ptr<Uploader>>(m, "Uploader")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("device", &Uploader::device);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def(py::init([](Family family, int device, const AttentionOptions& options,
                       std::shared_ptr<Batch> batch, std::int64_t float_workspace_bytes,
                       std::int32_t graph_max_rows) {
             return make_plan(family, device,
                              PlanRequest{.options = options,
                                          .batch = std::move(batch),
                                          .graph_max_rows = graph_max_rows},
                              float_workspace_bytes);
           }),
           py::arg("family"), py::arg("device"), py::arg("options"), py::arg("batch"),
           py::arg("float_workspace_bytes"), py::arg("graph_max_rows"))
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
      .def_property_readonly("id", [](const Plan& plan) { return plan.kernel().id; })
      .def_property_readonly("int_bytes", &Plan::int_bytes)
      .def_property_readonly("float_bytes", &Plan::float_bytes)
      .def_property_readonly("num_items", [](const Plan& plan) { return plan.sizes().num_items; })
      .def_property_readonly("num_ctas", [](const Plan& plan) { return plan.sizes().num_ctas; })
      .def_property_readonly("num_merges",
                             [](const Plan& plan) { return plan.sizes().num_merges(); })
      .def_property_readonly("num_kv_tiles",
                             [](const Plan& plan) { return plan.sizes().num_kv_tiles; })
      .def_property_readonly("makespan_kv_tiles",
                             [](const Plan& plan) { return plan.sizes().makespan_kv_tiles; });
  py::class_<DevicePlan, std::shared_ptr<DevicePlan>>(m, "DevicePlan")
      .def(py::init([](std::shared_ptr<Uploader> uploader, Address memory, std::int64_t capacity) {
             return std::make_shared<DevicePlan>(std::move(uploader), pointer<void>(memory),
                                                 capacity);
           }),
           py::arg("uploader"), py::arg("memory"), py::arg("capacity"))
      .def(
          "arrive_before",
          [](const DevicePlan& place, Address stream) {
            place.arrive_before(pointer<void>(stream));
          },
          py::arg("stream"), py::call_guard<py::gil_scoped_release>());
  m.def("write_plans", &write, py::arg("placements"), py::arg("page_indices"), py::arg("stream"),
        py::arg("owner"), py::arg("state"));
  py::class_<Launch>(m, "Launch")
      .def(py::init([](std::shared_ptr<DevicePlan> place, const TokenHeadRows& q,
                       const PageTokenHead& k, const PageTokenHead& v, const TokenHead& o,
                       const TokenHead& lse) {
             return std::make_unique<Launch>(std::move(place), run_tensors(q, k, v, o, lse));
           }),
           py::arg("place"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("o"), py::arg("lse"))
      .def_static(
          "of_segments",
          [](std::shared_ptr<DevicePlan> place, const py::sequence& segments) {
            auto tensors = [](const py::handle& given) {
              using Row =
                  std::tuple<TokenHeadRows, PageTokenHead, PageTokenHead, TokenHead, TokenHead>;
              return std::apply(&run_tensors, given.cast<Row>());
            };
            return std::make_unique<Launch>(std::move(place),
                                            per_segment<RunTensors>(segments, tensors));
          },
          "Bound to (q, k, v, o, lse) of each segment.", py::arg("place"), py::arg("segments"))
      // Other Python threads go on meanwhile: on the CPU this is the computation, and on a GPU a
      // launch waits where the queue is full, maybe for a host callback that needs the interpreter.
      .def("run", &run, py::call_guard<py::gil_scoped_release>())
      .def("run_on_threads", &run_on_threads, py::call_guard<py::gil_scoped_release>())
      .def("run_segments", &run_segments, py::arg("segments"), py::arg("float_workspace"),
           py::arg("stream"), py::arg("num_threads"));
}

}  // namespace preflash
