#include "bindings/repeated_plan.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/fast_call.h"
#include "core/device.h"

namespace preflash {

namespace py = pybind11;

namespace {

// Names of Python's attributes.
struct WrapperNames {
  py::str plan = "_plan", repeat = "_repeat", captured = "captured", others = "others";
  py::str filled_with = "filled_with", reserved = "reserved", kv_lens = "kv_lens";
  py::str kv_layout = "_kv_layout";
};

const WrapperNames& names() {
  return made_once<WrapperNames>([] { return WrapperNames{}; });
}

Py_ssize_t field_of(py::handle tuple, const char* name) {
  return py::type::of(tuple).attr("_fields").attr("index")(name).cast<Py_ssize_t>();
}

// A copy of a NamedTuple with other values in some fields.
py::object with_fields(const py::object& tuple,
                       std::initializer_list<std::pair<Py_ssize_t, py::object>> changes) {
  const auto fields = py::reinterpret_steal<py::list>(PySequence_List(tuple.ptr()));
  for (const auto& [field, value] : changes) fields[field] = value;
  const py::tuple arguments = py::make_tuple(fields);
  PyObject* const made = PyTuple_Type.tp_new(Py_TYPE(tuple.ptr()), arguments.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

bool is_set(const py::object& mode) {
  const auto value = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(mode.ptr()));
  const int truth = value ? PyObject_IsTrue(value.ptr()) : -1;
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

// True if torch records operations instead of making them, or a mode watches them.
bool a_mode_is_active() {
  struct Modes {
    py::object functions, dispatch, tracing;
  };
  const Modes& modes = made_once<Modes>([] {
    const py::module_ module = py::module_::import("torch._C");
    return Modes{.functions = module.attr("_is_torch_function_mode_enabled"),
                 .dispatch = module.attr("_len_torch_dispatch_stack"),
                 .tracing = module.attr("_is_tracing")};
  });
  return is_set(modes.functions) || is_set(modes.dispatch) || is_set(modes.tracing);
}

// True for equal constants of one type: 1, 1.0 and True are equal, but not the same. A tensor may
// hold other values by now.
bool same_constant(PyObject* a, PyObject* b) {
  const auto& dtype =
      made_once<py::object>([] { return py::module_::import("torch").attr("dtype"); });
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (a == Py_None || PyBool_Check(a) ||
      Py_TYPE(a) == reinterpret_cast<PyTypeObject*>(dtype.ptr())) {
    return a == b;
  }
  if (PyFloat_CheckExact(a)) {  // by their bits: 0.0 is not -0.0
    return std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(a)) ==
           std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(b));
  }
  if (!PyLong_CheckExact(a) && !PyUnicode_CheckExact(a)) return false;
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal != 0;
}

ArrayRole array_role(const std::string& name) {
  constexpr std::pair<const char*, ArrayRole> kRoles[] = {
      {"qo_indptr", ArrayRole::kQoIndptr},        {"kv_indptr", ArrayRole::kKvIndptr},
      {"on_host", ArrayRole::kKvIndptrOnHost},    {"indices", ArrayRole::kIndices},
      {"last_page_len", ArrayRole::kLastPageLen}, {"kv_lens", ArrayRole::kKvLens},
  };
  for (const auto& [known, role] : kRoles) {
    if (name == known) return role;
  }
  throw py::value_error("no index array is a " + name);
}

}  // namespace

// A plan that has passed every check and has changed nothing.
struct RepeatedPlan::NewPlan {
  std::shared_ptr<ExecutionPlan> variant;
  py::object request;
  std::shared_ptr<Batch> batch;
  std::int64_t largest_page;  // -1: not known, or ragged
  std::shared_ptr<PlanBuffer> where = nullptr;
};

RepeatedPlan::RepeatedPlan(py::object call, const py::sequence& roles, py::object plan,
                           py::object graph)
    : call_(std::move(call)),
      plan_(std::move(plan)),
      graph_(std::move(graph)),
      request_(plan_.attr("request")),
      has_default_(!plan_.attr("default_variant").is_none()),
      primary_(plan_.attr("primary").cast<std::shared_ptr<ExecutionPlan>>()),
      workspace_(plan_.attr("workspace").cast<std::shared_ptr<Workspace>>()),
      family_(primary_->backend().attr("family").cast<Family>()),
      float_bytes_(workspace_->float_bytes()),
      graph_rows_(request_.attr("graph_rows").cast<std::int32_t>()),
      graph_mask_bytes_(request_.attr("graph_mask_bytes").cast<std::int64_t>()),
      kv_lengths_are_upper_bounds_(!request_.attr("kv_lens").is_none()),
      fields_{.request = field_of(plan_, "request"),
              .default_variant = field_of(plan_, "default_variant"),
              .primary = field_of(plan_, "primary"),
              .others = field_of(plan_, "others"),
              .windows = field_of(plan_, "windows"),
              .batch = field_of(request_, "batch"),
              .pages = field_of(request_, "pages"),
              .kv_lens = field_of(request_, "kv_lens")} {
  variant_request_ = primary_->requests()[0];
  options_ = variant_request_.attr("options").cast<AttentionOptions>();
  kv_layout_ = request_.attr("kv_layout");
  if (const py::object pages = request_.attr("pages"); !pages.is_none()) {
    fields_.given = field_of(pages, "given");
    fields_.on_device = field_of(pages, "on_device");
    fields_.largest = field_of(pages, "largest");
  }
  if (!graph_.is_none()) {
    held_ = graph_.attr("held").cast<std::shared_ptr<PinnedAddresses>>();
    graph_buffers_ = graph_.attr("buffers");
    indices_buffer_ = graph_buffers_.attr("indices");
  }
  if (workspace_->float_buffer() != nullptr) {
    float_memory_ =
        reach_of(workspace_->torch(), "float_workspace_buffer", workspace_->float_tensor());
  }
  for (const py::handle role : roles) {
    const auto [name, position, of] = role.cast<std::tuple<std::string, Py_ssize_t, std::string>>();
    roles_.push_back({.name = name, .position = position, .role = array_role(of)});
  }
}

bool RepeatedPlan::remember(const py::tuple& by_position, const py::dict& by_name) {
  bool constants = true;
  const auto kept = [&](const Role* role, py::handle value) -> py::object {
    if (role != nullptr)
      return value.is_none() ? py::object(py::none()) : py::object(py::bool_(true));
    constants = constants && same_constant(value.ptr(), value.ptr());
    return py::reinterpret_borrow<py::object>(value);
  };
  py::list positions;
  for (std::size_t i = 0; i < by_position.size(); ++i) {
    positions.append(kept(role_at(static_cast<Py_ssize_t>(i)), by_position[i]));
  }
  for (const auto& [name, value] : by_name) by_name_[name] = kept(role_of(name.ptr()), value);
  by_position_ = py::tuple(positions);
  return constants;
}

const RepeatedPlan::Role* RepeatedPlan::role_at(Py_ssize_t position) const {
  const auto found = std::ranges::find(roles_, position, &Role::position);
  return found == roles_.end() ? nullptr : &*found;
}

const RepeatedPlan::Role* RepeatedPlan::role_of(PyObject* name) const {
  const auto found = std::ranges::find_if(roles_, [name](const Role& role) {
    return PyUnicode_CompareWithASCIIString(name, role.name.c_str()) == 0;
  });
  return found == roles_.end() ? nullptr : &*found;
}

bool RepeatedPlan::find_arrays(const py::tuple& by_position, const py::dict& by_name,
                               Arrays* arrays) const {
  GivenArrays& given = arrays->given;
  const auto take = [&](const Role* role, PyObject* value, PyObject* before) {
    if (role == nullptr) return same_constant(value, before);
    if ((value == Py_None) != (before == Py_None)) return false;
    if (value == Py_None) return true;
    switch (role->role) {
      case ArrayRole::kQoIndptr: given.qo_indptr = value; break;
      case ArrayRole::kKvIndptr: given.kv_indptr = value; break;
      case ArrayRole::kKvIndptrOnHost: arrays->kv_indptr_on_host = value; break;
      case ArrayRole::kIndices: given.indices = value; break;
      case ArrayRole::kLastPageLen: given.last_page_len = value; break;
      case ArrayRole::kKvLens: arrays->kv_lens = value; break;
    }
    return true;
  };
  if (by_position.size() != by_position_.size() || by_name.size() != by_name_.size()) return false;
  for (Py_ssize_t i = 0; i < static_cast<Py_ssize_t>(by_position.size()); ++i) {
    PyObject* const before = PyTuple_GET_ITEM(by_position_.ptr(), i);
    if (!take(role_at(i), PyTuple_GET_ITEM(by_position.ptr(), i), before)) return false;
  }
  for (const auto& [name, value] : by_name) {
    PyObject* const before = PyDict_GetItemWithError(by_name_.ptr(), name.ptr());
    if (before == nullptr || !take(role_of(name.ptr()), value.ptr(), before)) return false;
  }
  return true;
}

py::list RepeatedPlan::bring_to_host(const HostArrays& host_arrays, GivenArrays* given) const {
  const int device = workspace_->device_stream().ordinal();
  const bool on_gpu = workspace_->device_stream().on_gpu();
  py::list remote, copies;
  std::vector<PyObject**> brought;
  const auto bring = [&](PyObject** array) {
    if (*array == nullptr || !on_gpu || !is_usual(host_arrays, *array, device)) return;
    remote.append(py::handle(*array));
    brought.push_back(array);
  };
  bring(&given->qo_indptr);
  bring(&given->kv_indptr);
  // A page of one token holds one: no wait to hear it.
  if (given->page_size > 1 || !brought.empty()) bring(&given->last_page_len);
  if (brought.empty()) return copies;
  copies = py::list(workspace_->functions()->to_host(remote));
  for (std::size_t i = 0; i < brought.size(); ++i) *brought[i] = py::handle(copies[i]).ptr();
  return copies;
}

py::object RepeatedPlan::page_list(const GivenArrays& given, const BatchOfArrays& found) const {
  const auto before =
      py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(request_.ptr(), fields_.pages));
  if (!found.has_pages) return before;
  auto indices = py::reinterpret_borrow<py::object>(given.indices);
  if (found.pages_on_gpu) {
    const std::int64_t used = found.batch->kv_end();
    if (workspace_->torch().read(given.indices)->shape[0] != used) {
      indices = indices.attr("narrow")(0, 0, used);
    }
  }
  py::object on_device = indices_buffer_;
  if (graph_.is_none() && (found.pages_on_gpu || found.table_extent)) on_device = indices;
  if (found.table_extent) {
    on_device =
        on_device.attr("as_strided")(py::make_tuple(*found.table_extent), py::make_tuple(1));
  }
  py::object largest = py::none();
  if (found.largest_page >= 0 || (!found.pages_on_gpu && !found.table_extent)) {
    largest = py::int_(found.largest_page);
  }
  return with_fields(before, {{fields_.given, indices},
                              {fields_.on_device, std::move(on_device)},
                              {fields_.largest, std::move(largest)}});
}

std::optional<RepeatedPlan::NewPlan> RepeatedPlan::new_plan(const Arrays& arrays) const {
  const Torch& torch = workspace_->torch();
  const HostArrays& host_arrays =
      made_once<HostArrays>([&] { return HostArrays(workspace_->functions()->torch); });
  const PlannedSegment& before = primary_->plan()->segments()[0];
  GivenArrays given = arrays.given;
  given.page_size = before.batch->page_size();
  given.uploader = workspace_->uploader().get();
  given.kv_lengths_are_upper_bounds = kv_lengths_are_upper_bounds_;
  const bool paged = given.page_size > 0;
  const bool of_graphs = !graph_.is_none();
  if (!indices_buffer_.is_none()) given.indices_buffer = indices_buffer_.ptr();
  if (arrays.kv_indptr_on_host != nullptr) given.kv_indptr = arrays.kv_indptr_on_host;
  const py::list copies = bring_to_host(host_arrays, &given);
  const auto found = batch_of_usual(host_arrays, given);
  if (!found || found->has_pages != paged) return {};
  if (of_graphs && found->batch->num_requests() != before.batch->num_requests()) return {};
  py::object kv_lens = py::none();
  if (kv_lengths_are_upper_bounds_) {
    if (arrays.kv_lens == nullptr || !may_read(arrays.kv_lens) ||
        !is_kv_lens(host_arrays, arrays.kv_lens, *found->batch,
                    workspace_->device_stream().ordinal())) {
      return {};
    }
    kv_lens = py::reinterpret_borrow<py::object>(arrays.kv_lens);
    found->batch->use_kv_upper_bounds();
  } else if (arrays.kv_lens != nullptr &&
             !has_kv_lens(host_arrays, arrays.kv_lens, *found->batch)) {
    return {};
  }
  if (before.batch->exact_rows()) found->batch->require_exact_rows();
  if (workspace_->float_buffer() != nullptr) {
    const TensorMemory now = reach_of(torch, "float_workspace_buffer", workspace_->float_tensor());
    if (now.address != float_memory_.address || now.bytes != float_memory_.bytes) return {};
  }

  const py::object pages = page_list(given, *found);
  const py::object lengths = py::cast(found->batch);
  const auto with_lengths = [&](const py::object& request) {
    return with_fields(
        request, {{fields_.batch, lengths}, {fields_.pages, pages}, {fields_.kv_lens, kv_lens}});
  };
  py::object request = with_lengths(request_);
  py::object of_variant = variant_request_.is(request_) ? request : with_lengths(variant_request_);
  const PlanRequest planned{.options = options_,
                            .batch = found->batch,
                            .graph_max_rows = graph_rows_,
                            .graph_mask_bytes = graph_mask_bytes_};
  std::shared_ptr<const Plan> plan;
  {
    py::gil_scoped_release release;
    PerSegment<PlanRequest> requests;
    requests.add(planned);
    plan = std::make_shared<Plan>(family_, workspace_->device_stream().ordinal(), requests,
                                  float_bytes_);
  }
  if (const auto room = workspace_->int_room(); room && plan->int_bytes() > *room) return {};
  return NewPlan{.variant = std::make_shared<ExecutionPlan>(primary_->backend(), std::move(plan),
                                                            py::make_tuple(of_variant)),
                 .request = request,
                 .batch = found->batch,
                 .largest_page = found->largest_page};
}

bool RepeatedPlan::may_read(PyObject* kv_lens) const {
  const py::tuple captured = plan_.attr(names().captured);
  const auto before =
      py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(request_.ptr(), fields_.kv_lens));
  const Torch& torch = workspace_->torch();
  return captured.empty() || torch.address_of(before.ptr()) == torch.address_of(kv_lens);
}

bool RepeatedPlan::find_buffer(const NewPlan& made, std::shared_ptr<PlanBuffer>* where) const {
  const auto& buffer = primary_->plan_buffer();
  const py::tuple captured = plan_.attr(names().captured);
  const auto others =
      py::reinterpret_steal<py::list>(PyDict_Values(py::object(plan_.attr(names().others)).ptr()));
  if (graph_.is_none()) {
    // The next plan keeps the variants that a graph replays; Python makes it.
    return !buffer->shared && std::ranges::none_of(others, [](py::handle other) {
      return other.cast<ExecutionPlan&>().plan_buffer()->held() != nullptr;
    });
  }
  if (!others.empty()) return false;
  if (captured.empty()) return buffer->held() == nullptr;
  if (captured.size() > 1) return false;
  const py::tuple one = captured[0];
  if (one[0].cast<const AttentionOptions&>() != options_ ||
      one[1].cast<std::shared_ptr<PlanBuffer>>() != buffer) {
    return false;
  }
  buffer->check_captured(0, *made.batch, made.largest_page);
  *where = buffer;
  return true;
}

bool RepeatedPlan::has_reserve(std::int64_t bytes) const {
  if (graph_.is_none() || !workspace_->device_stream().on_gpu()) return true;
  const py::list reserved = graph_.attr(names().reserved);
  constexpr std::size_t kReserved = 2;  // NOTE: _RESERVED of _wrappers/graph.py
  return reserved.size() >= kReserved && std::ranges::all_of(reserved, [bytes](py::handle buffer) {
           return buffer.cast<const Buffer&>().bytes() >= bytes;
         });
}

std::vector<HostCopy> RepeatedPlan::copies_for_graphs(const Arrays& arrays,
                                                      const Batch& batch) const {
  constexpr std::int64_t kAll = std::int64_t{1} << 31;
  const GivenArrays& given = arrays.given;
  std::vector<HostCopy> copies;
  const auto add = [&](const char* name, PyObject* array, std::int64_t most) {
    const py::object buffer = graph_buffers_.attr(name);
    add_copy(*workspace_, {buffer, py::handle(array), most}, &copies);
  };
  add("kv_indptr", arrays.kv_indptr_on_host ? arrays.kv_indptr_on_host : given.kv_indptr, kAll);
  if (given.qo_indptr != nullptr) {
    add("qo_indptr", given.qo_indptr, kAll);
    graph_.attr(names().filled_with) = py::none();
  }
  if (given.indices != nullptr) {
    add("indices", given.indices, batch.kv_end());
    add("last_page_len", given.last_page_len, kAll);
  }
  return copies;
}

bool RepeatedPlan::again(py::handle wrapper, py::handle call, const py::tuple& by_position,
                         const py::dict& by_name) {
  if (busy_.test_and_set()) return false;  // in another thread, or around a signal handler
  const std::unique_ptr<std::atomic_flag, void (*)(std::atomic_flag*)> release(
      &busy_, [](std::atomic_flag* busy) { busy->clear(); });
  Arrays arrays;
  std::optional<NewPlan> made;
  try {
    if (!call.is(call_) || !py::object(wrapper.attr(names().plan)).is(plan_) ||
        !kv_layout_.equal(wrapper.attr(names().kv_layout)) || debugging() || a_mode_is_active() ||
        !find_arrays(by_position, by_name, &arrays)) {
      return false;
    }
    if (!graph_.is_none()) {
      held_->check();
      if (workspace_->device_stream().is_capturing()) return false;
      // The buffer of qo_indptr holds one query each, unless another plan() wrote it.
      if (arrays.given.qo_indptr == nullptr &&
          py::object(graph_.attr(names().filled_with)).is_none())
        return false;
    }
    made = new_plan(arrays);
    if (!made || !find_buffer(*made, &made->where)) return false;
    if (!has_reserve(made->variant->plan()->int_bytes())) return false;
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt
    return false;
  } catch (const std::exception&) {
    return false;  // the call takes the long way through Python, which raises this error again
  }
  made->variant->allocate_in(workspace_, made->where);
  const py::object plan = with_fields(
      plan_, {{fields_.request, made->request},
              {fields_.default_variant, has_default_ ? py::cast(made->variant) : py::none()},
              {fields_.primary, py::cast(made->variant)},
              {fields_.others, py::dict()},
              {fields_.windows, py::dict()}});
  std::vector<HostCopy> copies;
  if (!graph_.is_none()) {
    // From here on the old plan has lost its buffers: an interrupted call leaves no plan.
    const py::object nothing = py::none();
    wrapper.attr(names().plan) = with_fields(plan_, {{fields_.request, nothing},
                                                     {fields_.default_variant, nothing},
                                                     {fields_.primary, nothing},
                                                     {fields_.others, py::dict()},
                                                     {fields_.windows, py::dict()}});
    order_behind_users(primary_->buffers(), workspace_->device_stream());
    copies = copies_for_graphs(arrays, *made->batch);
    if (kv_lengths_are_upper_bounds_) graph_.attr(names().kv_lens) = py::handle(arrays.kv_lens);
  }
  ExecutionPlan::upload({made->variant}, workspace_->device_stream().current(), std::move(copies));
  wrapper.attr(names().plan) = plan;
  if (!primary_->plan_buffer()->shared) workspace_->give_back(primary_);
  plan_ = plan;
  request_ = made->request;
  variant_request_ = made->variant->requests()[0];
  primary_ = made->variant;
  return true;
}

bool RememberedCalls::Remembered::same(py::handle other_call, const py::tuple& other_position,
                                       const py::dict& other_name) const {
  if (!call.is(other_call) || by_position.size() != other_position.size() ||
      by_name.size() != other_name.size()) {
    return false;
  }
  for (std::size_t i = 0; i < by_position.size(); ++i) {
    if (!same_constant(other_position[i].ptr(), by_position[i].ptr())) return false;
  }
  return std::ranges::all_of(other_name, [&](const auto& given) {
    PyObject* const before = PyDict_GetItemWithError(by_name.ptr(), given.first.ptr());
    return before != nullptr && same_constant(given.second.ptr(), before);
  });
}

std::shared_ptr<const RememberedCalls::Calls> RememberedCalls::calls() const {
  const std::lock_guard lock(guard_);
  return calls_;
}

py::object RememberedCalls::find(py::handle call, const py::tuple& by_position,
                                 const py::dict& by_name) const {
  const auto calls = this->calls();
  const auto found = std::ranges::find_if(
      *calls, [&](const Remembered& one) { return one.same(call, by_position, by_name); });
  return found == calls->end() ? py::none() : found->made;
}

void RememberedCalls::keep(py::object call, py::tuple by_position, py::dict by_name,
                           const py::object& make) {
  constexpr std::size_t kKept = 16;
  Remembered kept{.call = std::move(call),
                  .by_position = std::move(by_position),
                  .by_name = std::move(by_name),
                  .made = py::none()};
  // No call with anything but constants is the same as itself.
  if (!kept.same(kept.call, kept.by_position, kept.by_name)) return;
  kept.made = make();
  auto now = std::make_shared<Calls>(*calls());
  std::erase_if(*now, [&](const Remembered& one) {
    return one.same(kept.call, kept.by_position, kept.by_name);
  });
  if (now->size() >= kKept) now->erase(now->begin());
  now->push_back(std::move(kept));
  std::shared_ptr<const Calls> result = std::move(now);
  const std::lock_guard lock(guard_);
  calls_.swap(result);  // the old ones go once others may go on
}

namespace {

// (wrapper, call, arguments by position, by name)
PyObject* plan_again(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "plan_again takes 4 arguments");
  try {
    PyObject* const held = PyObject_GetAttr(given[0], names().repeat.ptr());
    if (held == nullptr) PyErr_Clear();  // a wrapper of another library
    const auto repeat = py::reinterpret_steal<py::object>(held);
    if (!repeat || repeat.is_none()) Py_RETURN_FALSE;
    const bool planned = repeat.cast<RepeatedPlan&>().again(
        given[0], given[1], argument<py::tuple>(given, 2), argument<py::dict>(given, 3));
    return PyBool_FromLong(planned);
  } catch (...) {
    return raise(std::current_exception());
  }
}

PyMethodDef again_definition = fast_definition(
    "plan_again", &plan_again, "Plans a call that differs from the last in index arrays alone.");

}  // namespace

void bind_repeated_plan(py::module_& m) {
  py::class_<RepeatedPlan, std::shared_ptr<RepeatedPlan>>(m, "RepeatedPlan")
      .def(py::init<py::object, py::sequence, py::object, py::object>(), py::arg("call"),
           py::arg("roles"), py::arg("plan"), py::arg("graph"))
      .def("remember", &RepeatedPlan::remember, py::arg("by_position"), py::arg("by_name"));
  py::class_<RememberedCalls>(m, "RememberedCalls")
      .def(py::init())
      .def("find", &RememberedCalls::find, py::arg("call"), py::arg("by_position"),
           py::arg("by_name"))
      .def("keep", &RememberedCalls::keep, py::arg("call"), py::arg("by_position"),
           py::arg("by_name"), py::arg("make"));
  add_functions(m, {&again_definition});
}

}  // namespace preflash
