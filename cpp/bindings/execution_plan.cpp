#include "bindings/execution_plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "core/device.h"
#include "cpu/interrupt.h"

namespace preflash {

namespace py = pybind11;

namespace {

constexpr std::size_t kLaunchesKept = 64;

thread_local std::string last_id;

// Strides and extents of one segment's tensors, as Python's checks return them.
// q: strides of [token, head], then the number of tokens. k, v: strides of [page, token, head],
// then the numbers of pages and of tokens per page. out: strides of [token, head]. lse: the same,
// then the values per row (LseTensor::values()).
using QNumbers = std::array<std::int64_t, 3>;
using KvNumbers = std::array<std::int64_t, 5>;
using OutNumbers = std::array<std::int64_t, 2>;
using LseNumbers = std::array<std::int64_t, 3>;
using SegmentNumbers = std::tuple<QNumbers, KvNumbers, KvNumbers, OutNumbers, LseNumbers>;

KvTensor kv_tensor(const KvNumbers& numbers) {
  return {.stride_page = numbers[0],
          .stride_token = numbers[1],
          .stride_head = numbers[2],
          .num_pages = numbers[3],
          .num_tokens = numbers[4]};
}

RunTensors run_tensors(const SegmentNumbers& numbers) {
  const auto& [q, k, v, out, lse] = numbers;
  return {.q = {.stride_token = q[0], .stride_head = q[1], .num_tokens = q[2]},
          .k = kv_tensor(k),
          .v = kv_tensor(v),
          .o = {.stride_token = out[0], .stride_head = out[1]},
          .lse = {.stride_token = lse[0],
                  .stride_head = lse[1],
                  .form = lse[2] == 2 ? LseForm::kMaxAndSum : LseForm::kLogSum}};
}

// Runs Python's signal handlers, as the interpreter does between bytecodes: Ctrl-C raises here.
bool signal_handler_raised() {
  py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

// Throws what a signal handler raised meanwhile.
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

// Releases the GIL: on the CPU this is the computation, and on a GPU a launch waits where the queue
// is full, perhaps for a host callback that needs the GIL.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* state_;
};

// Fields of _check.request.Request and of its PageList.
struct RequestNames {
  py::str mask = "mask", kv_lens = "kv_lens", pages = "pages", graph_rows = "graph_rows";
  py::str on_device = "on_device", largest = "largest";
  py::str kv_layout = "kv_layout", q_given = "q_given";
};

const RequestNames& request_names() {
  return made_once<RequestNames>([] { return RequestNames{}; });
}

py::object made(const py::object& make, PyObject* q) {
  PyObject* const result = PyObject_CallOneArg(make.ptr(), q);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace

RunSettings::RunSettings(py::object float_workspace, PlansAlike alike)
    : of(std::move(alike)),
      float_workspace(std::move(float_workspace)),
      num_threads(of.backend.attr("num_threads")),
      launched_by(of.backend.attr("launched_by")) {}

ExecutionPlan::ExecutionPlan(py::object backend, std::shared_ptr<const Plan> plan,
                             py::tuple requests)
    : backend_(std::move(backend)),
      plan_(std::move(plan)),
      num_segments_(plan_->segments().size()),
      requests_(std::move(requests)),
      converts_(std::ranges::any_of(requests_, [](py::handle request) {
        return !request.attr(request_names().q_given).is_none();
      })) {}

void ExecutionPlan::allocate_in(std::shared_ptr<Workspace> workspace,
                                std::shared_ptr<PlanBuffer> where) {
  workspace_ = std::move(workspace);
  plan_buffer_ = std::move(where);
  if (plan_buffer_ == nullptr) {
    plan_buffer_ =
        std::make_shared<PlanBuffer>(workspace_->uploader(), workspace_->functions()->torch,
                                     workspace_->int_buffer(plan_->int_bytes()));
  }
  buffers_ = {plan_buffer_->buffer};
  if (workspace_->float_buffer() != nullptr) buffers_.push_back(workspace_->float_buffer());
  settings_ = workspace_->settings_for(*this);
  held_.emplace(workspace_->functions()->torch, "plan()", "call plan() again");
  held_->hold(
      "int_workspace_buffer", plan_buffer_->buffer->tensor(),
      {.address = reinterpret_cast<Address>(plan_buffer_->memory()), .bytes = plan_->int_bytes()});
  memory_.clear();
  for (int s = 0; s < num_segments_; ++s) memory_.push_back(segment_memory(s));
  stream_ = workspace_->device_stream().current();
  for (const auto& buffer : buffers_) buffer->used_on(workspace_->device_stream(), stream_);
}

PlansAlike ExecutionPlan::alike() const {
  const RequestNames& names = request_names();
  PlansAlike alike{.backend = backend_, .segments = {}};
  for (int s = 0; s < num_segments_; ++s) {
    const PlannedSegment& segment = plan_->segments()[s];
    const py::handle request = requests_[s];
    alike.segments.push_back({.options = segment.options,
                              .kv_layout = request.attr(names.kv_layout),
                              .page_size = segment.batch->page_size(),
                              .q_given = request.attr(names.q_given)});
  }
  return alike;
}

PlannedSegmentMemory ExecutionPlan::segment_memory(int segment) {
  const RequestNames& names = request_names();
  const py::handle request = requests_[segment];
  const Batch& batch = *plan_->segments()[segment].batch;
  const bool of_graphs = request.attr(names.graph_rows).cast<int>() > 0;
  const auto use = [&](const py::object& tensor) {
    // Graphs use the same tensors from plan to plan.
    buffers_.push_back(of_graphs ? workspace_->buffer_of(tensor)
                                 : std::make_shared<Buffer>(tensor));
  };
  const auto hold = [&](const char* name, const py::object& tensor, std::int64_t bytes) {
    const Address address = torch().address_of(tensor.ptr());
    held_->hold(name, tensor, {.address = address, .bytes = bytes});
    return address;
  };
  py::object mask = request.attr(names.mask), kv_lens = request.attr(names.kv_lens);
  PlannedSegmentMemory found{
      .memory = RunMemory::of_plan(torch(), settings_->float_workspace, mask, kv_lens)};
  if (!kv_lens.is_none()) {
    use(kv_lens);
    hold("seq_lens", kv_lens, batch.num_requests() * std::int64_t{sizeof(std::int32_t)});
  }
  const py::object pages = request.attr(names.pages);
  if (!pages.is_none()) {
    const py::object indices = pages.attr(names.on_device), largest = pages.attr(names.largest);
    if (!indices.is_none()) {
      use(indices);
      const char* const name = of_graphs ? "paged_kv_indices_buf" : "paged_kv_indices";
      const std::int64_t bytes = batch.page_entries() * std::int64_t{sizeof(std::int32_t)};
      found.page_indices = pointer<const std::int32_t>(hold(name, indices, bytes));
    }
    if (!largest.is_none()) found.largest_page = largest.cast<std::int64_t>();
  }
  if (!mask.is_none()) {
    use(mask);
    if (of_graphs) {  // the bits may change on the device after plan()
      hold("custom_mask_buf", mask, batch.mask_bytes());
    } else if (num_segments_ == 1) {  // no kernel of two segments asks which tiles are full
      found.mask_bits = found.memory.extras.mask_bits;
    }
  }
  return found;
}

void ExecutionPlan::upload(const std::vector<std::shared_ptr<ExecutionPlan>>& variants,
                           void* stream, std::vector<HostCopy> copies) {
  Upload upload{.copies = std::move(copies), .stream = stream};
  for (const PlannedSegmentMemory& segment : variants.front()->memory_) {
    upload.page_indices.add(segment.page_indices);
  }
  if (const auto* mask_bits = variants.front()->memory_.front().mask_bits) {
    upload.mask_bits = mask_bits;
  }
  py::gil_scoped_release release;  // staging may be busy with an earlier copy
  for (const auto& variant : variants) {
    variant->plan_buffer_->write(variant->plan_, upload);
    upload.copies.clear();  // they went with the first plan
  }
}

ExecutionPlan::Call ExecutionPlan::checked(PyObject* const* arguments, Py_ssize_t count) {
  constexpr int kArguments = SegmentInputs::kArguments;
  if (count % kArguments != 0) refuse_arguments();
  if (count != num_segments_ * kArguments) {
    throw std::invalid_argument("the plan has " + std::to_string(num_segments_) +
                                " segments; got tensors for " + std::to_string(count / kArguments));
  }
  Call call;
  for (int s = 0; s < num_segments_; ++s) {
    const SegmentInputs given(arguments + s * kArguments);
    try {
      call.in_place[s].emplace(given, TensorDescs(torch(), given));
    } catch (const std::exception&) {
      ask(functions().check, arguments);  // says which argument is no ordinary tensor
      throw;
    }
  }
  call.bound = bound_to(call, arguments);
  for (int s = 0; s < num_segments_; ++s) {
    const auto& [given, seen] = call.segment(s);
    for (std::size_t i = 0; i < given.heads.size(); ++i) {
      if (given.heads[i] == Py_None || seen.heads[i] != 0) continue;
      ask(functions().check, arguments);
      throw std::invalid_argument(std::string(kHeadTensors[i].name) + " has no memory behind it");
    }
  }
  if (records(call)) ask(functions().refuse, arguments);
  return call;
}

std::shared_ptr<ExecutionPlan::Bound> ExecutionPlan::find_bound(const Call& call) {
  const std::lock_guard lock(guard_);
  const auto found = std::ranges::find_if(bound_, [&](const std::shared_ptr<Bound>& bound) {
    return looks_like(*bound->checked, call);
  });
  if (found == bound_.end()) return nullptr;
  std::swap(*found, bound_.front());  // where the next layer looks first
  return bound_.front();
}

std::shared_ptr<ExecutionPlan::Bound> ExecutionPlan::bound_to(const Call& call,
                                                              PyObject* const* arguments) {
  if (auto found = find_bound(call)) return found;
  const auto checked = tensors_of(call, arguments);
  const auto bound =
      std::make_shared<Bound>(Bound{checked, Launch(plan_buffer_, checked->tensors)});
  held_->check_storage();
  std::vector<std::shared_ptr<Bound>> dropped;  // once others may go on
  const std::lock_guard lock(guard_);
  if (bound_.size() >= kLaunchesKept) dropped.swap(bound_);
  bound_.insert(bound_.begin(), bound);
  return bound;
}

bool ExecutionPlan::looks_like(const CheckedTensors& checked, const Call& call) const {
  for (int s = 0; s < num_segments_; ++s) {
    if (checked.facts[s] != call.segment(s).seen.facts) return false;
  }
  return true;
}

bool ExecutionPlan::holds_plan(const CheckedTensors& checked) const {
  for (int s = 0; s < num_segments_; ++s) {
    const Batch& batch = *plan_->segments()[s].batch;
    const RunTensors& tensors = checked.tensors[s];
    const bool paged = batch.page_size() > 0;
    if (paged && tensors.k.num_pages <= memory_[s].largest_page) return false;
    if (batch.lengths_are_upper_bounds()) continue;
    if (tensors.q.num_tokens < batch.qo_end()) return false;
    if (batch.exact_rows() && tensors.q.num_tokens > batch.qo_end()) return false;
    if (!paged && std::min(tensors.k.num_tokens, tensors.v.num_tokens) < batch.kv_end())
      return false;
  }
  return true;
}

std::shared_ptr<const CheckedTensors> ExecutionPlan::find_known(const Call& call) const {
  const std::lock_guard lock(settings_->guard);
  for (const auto& checked : settings_->checked) {
    if (looks_like(*checked, call) && holds_plan(*checked)) return checked;
  }
  return nullptr;
}

std::shared_ptr<const CheckedTensors> ExecutionPlan::tensors_of(const Call& call,
                                                                PyObject* const* arguments) {
  if (auto known = find_known(call)) return known;
  const auto checked = check_tensors(call, arguments);
  std::vector<std::shared_ptr<const CheckedTensors>> dropped;  // once others may go on
  const std::lock_guard lock(settings_->guard);
  if (settings_->checked.size() >= kLaunchesKept) dropped.swap(settings_->checked);
  settings_->checked.push_back(checked);
  return checked;
}

std::shared_ptr<const CheckedTensors> ExecutionPlan::check_tensors(
    const Call& call, PyObject* const* arguments) const {
  CheckedTensors checked;
  for (int s = 0; s < num_segments_; ++s) checked.facts.add(call.segment(s).seen.facts);
  for (const py::handle segment : ask(functions().check, arguments)) {
    auto [numbers, v_offset, make_out, make_lse] =
        segment.cast<std::tuple<SegmentNumbers, std::int64_t, py::object, py::object>>();
    checked.tensors.add(run_tensors(numbers));
    checked.segments.push_back({v_offset, std::move(make_out), std::move(make_lse)});
  }
  return std::make_shared<CheckedTensors>(std::move(checked));
}

// True if autograd or jit tracks a caller's tensor.
bool ExecutionPlan::records(const Call& call) const {
  constexpr int kTensors = 5 + SegmentFacts::kHeadTensorCount;
  std::array<PyObject*, kTensors * kMaxSegments> tensors;
  std::size_t count = 0;
  for (int s = 0; s < num_segments_; ++s) {
    const SegmentInputs& given = call.segment(s).given;
    PyObject* const v = given.one_cache ? nullptr : given.v;
    for (PyObject* tensor : {given.q, given.k, v, given.out, given.lse}) {
      if (tensor != nullptr) tensors[count++] = tensor;
    }
    for (PyObject* tensor : given.heads) {
      if (tensor != Py_None) tensors[count++] = tensor;
    }
  }
  return torch().records({tensors.data(), count});
}

py::object ExecutionPlan::ask(const py::object& function, PyObject* const* arguments) const {
  std::vector<PyObject*> given{requests_.ptr()};
  given.insert(given.end(), arguments, arguments + num_segments_ * SegmentInputs::kArguments);
  PyObject* const result = PyObject_Vectorcall(function.ptr(), given.data(), given.size(), nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object ExecutionPlan::run(PyObject* const* arguments, Py_ssize_t count) {
  if (!before_run.is_none()) before_run();
  if (!converts_) return run_converted(arguments, count);
  const Converted converted(*this, arguments, count);
  return run_converted(converted.arguments.data(), count);
}

void ExecutionPlan::check(PyObject* const* arguments, Py_ssize_t count) {
  if (!converts_) {
    checked(arguments, count);
    return;
  }
  const Converted converted(*this, arguments, count);
  checked(converted.arguments.data(), count);
}

ExecutionPlan::Converted::Converted(const ExecutionPlan& variant, PyObject* const* given,
                                    Py_ssize_t count)
    : arguments(given, given + count) {
  for (int s = 0; s < variant.num_segments_; ++s) {
    const py::handle request = variant.requests_[s];
    const auto at = static_cast<std::size_t>(s * SegmentInputs::kArguments);
    if (at >= arguments.size() || request.attr(request_names().q_given).is_none()) continue;
    queries.push_back(variant.functions().convert(py::handle(arguments[at]), request));
    arguments[at] = queries.back().ptr();
  }
}

py::object ExecutionPlan::run_converted(PyObject* const* arguments, Py_ssize_t count) {
  Call call = checked(arguments, count);
  RunArguments launched;
  std::array<py::object, kMaxSegments> results;
  for (int s = 0; s < num_segments_; ++s) {
    const BoundSegment& bound = call.bound->checked->segments[s];
    try {
      const std::int64_t q_rows = call.bound->checked->tensors[s].q.num_tokens;
      const bool blank = plan_->segments()[s].batch->may_leave_rows(q_rows);
      results[s] = make_outputs(bound, blank, &call.segment(s));
    } catch (const std::exception&) {
      // For what looks like the tensors before, as in torch.vmap.
      ask(functions().check, arguments);
      throw;
    }
    const auto& [given, seen] = call.segment(s);
    const RunMemory& memory = given.memory == nullptr ? memory_[s].memory : *given.memory;
    RunExtras extras = memory.extras;
    seen.add_heads(&extras);
    launched.segments.add({.q = pointer<const void>(seen.q),
                           .k = pointer<const void>(seen.k),
                           .v = pointer<const void>(seen.v + bound.v_offset),
                           .o = pointer<void>(seen.out),
                           .lse = pointer<float>(seen.lse),
                           .extras = extras,
                           .skip_factor = memory.skip_factor,
                           .sm_scale = given.sm_scale,
                           .out_scale = given.out_scale,
                           .lse_scale = given.lse_scale});
  }
  launched.stream = follow_stream();
  // All segments share one float workspace.
  const RunMemory* const memory = call.segment(0).given.memory;
  const py::object& partials = (memory == nullptr ? memory_[0].memory : *memory).partials;
  last_id = plan_->id();
  if (launch(call.bound, launched, partials))
    plan_buffer_->note_capture(call.bound->checked->tensors, partials);
  for (int s = 0; s < num_segments_; ++s) {
    const SegmentInputs& given = call.segment(s).given;
    if (given.out != nullptr) torch().tell_written(given.out);
    if (given.lse != nullptr) torch().tell_written(given.lse);
  }
  return num_segments_ == 1 ? results[0] : py::make_tuple(results[0], results[1]);
}

const std::string& ExecutionPlan::last_variant() { return last_id; }

py::object ExecutionPlan::make_outputs(const BoundSegment& bound, bool blank,
                                       CalledSegment* segment) const {
  const SegmentInputs& given = segment->given;
  TensorDescs& seen = segment->seen;
  py::object out = py::reinterpret_borrow<py::object>(given.out);
  if (!out) {
    out = made(bound.make_out, given.q);
    if (blank) out.attr("zero_")();
    seen.out = torch().address_of(out.ptr());
  }
  if (!given.wants_lse()) return out;
  py::object lse = py::reinterpret_borrow<py::object>(given.lse);
  if (!lse) {
    lse = made(bound.make_lse, given.q);
    if (blank) lse.attr("fill_")(-std::numeric_limits<double>::infinity());
    seen.see_lse(torch(), lse.ptr());
  }
  if (seen.lse_is_unbacked()) throw std::invalid_argument("lse has no memory behind it");
  return given.return_lse ? py::make_tuple(out, lse) : out;
}

void* ExecutionPlan::follow_stream() {
  const DeviceStream& device_stream = workspace_->device_stream();
  void* const stream = device_stream.current();
  if (stream != stream_) {
    {
      // When the plan's upload is complete, everything that plan() put on the device is.
      py::gil_scoped_release release;
      plan_buffer_->arrive_before(stream);
    }
    for (const auto& buffer : buffers_) buffer->used_on(device_stream, stream);
    stream_ = stream;
  }
  return stream;
}

bool ExecutionPlan::launch(const std::shared_ptr<Bound>& bound, const RunArguments& arguments,
                           const py::object& partials) const {
  if (settings_->launched_by.is_none()) return start(*bound, arguments, partials);
  const py::cpp_function start_it([self = shared_from_this(), bound, arguments, partials] {
    return self->start(*bound, arguments, partials);
  });
  return settings_->launched_by(start_it).cast<bool>();
}

bool ExecutionPlan::start(Bound& bound, RunArguments arguments, const py::object& partials) const {
  held_->check();
  if (partials.is_none()) return start_now(bound, arguments);
  const auto use = [&arguments](const TensorMemory& memory) {
    arguments.float_workspace = pointer<void>(memory.address);
    arguments.float_workspace_bytes = memory.bytes;
  };
  if (plan_buffer_->plan()->float_bytes() == 0) {
    // The plan does not use the workspace, but outputs must not overlap it. The first check goes by
    // its shape, which is cheap; if that refuses, the second one goes by its real memory.
    use(reach_of(torch(), "float_workspace_buffer", partials));
    try {
      return start_now(bound, arguments);
    } catch (const std::invalid_argument&) {  // before anything was launched
    }
  }
  use(memory_of(torch(), "float_workspace_buffer", partials));
  return start_now(bound, arguments);
}

bool ExecutionPlan::start_now(Bound& bound, RunArguments arguments) const {
  if (settings_->num_threads.is_none()) {
    const WithoutInterpreter others_run;
    return bound.launch.run(arguments);
  }
  arguments.num_threads = settings_->num_threads().cast<int>();
  check_num_threads(arguments.num_threads);
  const WithoutInterpreter others_run;
  return run_interruptibly(bound.launch, arguments);
}

}  // namespace preflash
