// A planned batch, or two in one launch: the kernel, the work list and, once allocated and
// uploaded, the launches. run() is one call for every layer; each combination of shapes, strides,
// dtypes and devices is checked once.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/guard.h"
#include "bindings/plan_buffer.h"
#include "bindings/segment_inputs.h"
#include "bindings/workspace.h"

namespace preflash {

// Results of the checks of one segment's tensors, for its launches.
struct BoundSegment {
  std::int64_t v_offset;      // bytes, where K and V are halves of one tensor
  pybind11::object make_out;  // (q): allocates out
  pybind11::object make_lse;  // (q): allocates lse
};

// Tensors that have passed the checks of a run, by what they look like.
struct CheckedTensors {
  PerSegment<SegmentFacts> facts;
  PerSegment<RunTensors> tensors;
  std::vector<BoundSegment> segments;
};

// Options, layout and backend, by which plans are compared that may differ in lengths alone.
struct PlansAlike {
  struct Segment {
    AttentionOptions options;
    pybind11::object kv_layout;  // a string
    int page_size;
    pybind11::object q_given;  // Request.q_given

    bool operator==(const Segment& other) const {
      return options == other.options && page_size == other.page_size &&
             q_given.is(other.q_given) && kv_layout.equal(other.kv_layout);
    }
  };

  pybind11::object backend;
  std::vector<Segment> segments;

  bool operator==(const PlansAlike& other) const {
    return backend.is(other.backend) && segments == other.segments;
  }
};

// Settings and checked tensors that the runs of plans alike share.
struct RunSettings {
  RunSettings(pybind11::object float_workspace, PlansAlike alike);

  PlansAlike of;
  pybind11::object float_workspace;  // a tensor, or None: every run brings its own, if any
  pybind11::object num_threads;      // called for every launch; None: not on the CPU
  // Called with each launch, which says whether it was captured, instead of starting it; None:
  // started.
  pybind11::object launched_by;

  Guard guard;  // guards checked
  // The tensors of earlier runs. Each plan compares its own lengths with them.
  std::vector<std::shared_ptr<const CheckedTensors>> checked = {};
};

// Memory of one planned segment that kernels read besides a run's tensors.
struct PlannedSegmentMemory {
  RunMemory memory;
  const std::int32_t* page_indices = nullptr;  // null: the plan's upload contains them, or ragged
  std::int64_t largest_page = -1;              // -1: not known here, or ragged
  // Null: no mask, or one that may change after plan().
  const std::uint8_t* mask_bits = nullptr;
};

// A plan that runs: a kernel variant, its work list in device memory, and the launches bound to the
// tensors of earlier runs. Thread-safe: any number of threads may call run() at once.
class ExecutionPlan : public std::enable_shared_from_this<ExecutionPlan> {
 public:
  // plan_buffer() is null. backend: _device.backends.Backend. requests: a Request for each segment.
  ExecutionPlan(pybind11::object backend, std::shared_ptr<const Plan> plan,
                pybind11::tuple requests);

  // Binds the plan to memory for its work list: to `where`, which a CUDA graph captured,
  // or where that is null to new memory of the workspace.
  void allocate_in(std::shared_ptr<Workspace> workspace,
                   std::shared_ptr<PlanBuffer> where = nullptr);
  // Starts the copies of the variants' work lists to the device, and of `copies` with the first.
  // variants: at least one, allocated, of one batch. Releases the GIL meanwhile.
  static void upload(const std::vector<std::shared_ptr<ExecutionPlan>>& variants, void* stream,
                     std::vector<HostCopy> copies);

  const pybind11::object& backend() const { return backend_; }
  const std::shared_ptr<const Plan>& plan() const { return plan_; }
  const pybind11::tuple& requests() const { return requests_; }
  // Before allocate_in(): the same request with its mask, which was planned without.
  void set_requests(pybind11::tuple requests) { requests_ = std::move(requests); }
  PlansAlike alike() const;
  // Null before allocate_in().
  const std::shared_ptr<PlanBuffer>& plan_buffer() const { return plan_buffer_; }
  const std::shared_ptr<Workspace>& workspace() const { return workspace_; }
  // The work list, and all else that launches use.
  const std::vector<std::shared_ptr<Buffer>>& buffers() const { return buffers_; }
  const RunFunctions& functions() const { return *workspace_->functions(); }
  const Torch& torch() const { return workspace_->torch(); }

  // Called before every run; None: nothing. For PREFLASH_DEBUG=1.
  pybind11::object before_run = pybind11::none();

  // arguments: SegmentInputs's, for each segment. Raises every error of the wrapper's run() about
  // its tensors, and returns its results.
  pybind11::object run(PyObject* const* arguments, Py_ssize_t count);
  // Makes the checks of run() alone.
  void check(PyObject* const* arguments, Py_ssize_t count);

  // Id of the plan that this thread ran last; "" before the first run.
  static const std::string& last_variant();

 private:
  // A launch for tensors that look like these.
  struct Bound {
    std::shared_ptr<const CheckedTensors> checked;
    Launch launch;
  };
  struct CalledSegment {
    CalledSegment(const SegmentInputs& given, const TensorDescs& seen) : given(given), seen(seen) {}

    SegmentInputs given;
    TensorDescs seen;
  };
  struct Call {
    std::optional<CalledSegment> in_place[kMaxSegments];
    std::shared_ptr<Bound> bound;

    CalledSegment& segment(int s) { return *in_place[s]; }
    const CalledSegment& segment(int s) const { return *in_place[s]; }
  };

  // Arguments whose queries have the dtype that kernels read.
  struct Converted {
    Converted(const ExecutionPlan& variant, PyObject* const* given, Py_ssize_t count);

    std::vector<pybind11::object> queries;
    std::vector<PyObject*> arguments;
  };

  pybind11::object run_converted(PyObject* const* arguments, Py_ssize_t count);
  Call checked(PyObject* const* arguments, Py_ssize_t count);
  // Null: no launch is bound to such tensors yet.
  std::shared_ptr<Bound> find_bound(const Call& call);
  std::shared_ptr<Bound> bound_to(const Call& call, PyObject* const* arguments);
  // Null: no run has checked such tensors yet.
  std::shared_ptr<const CheckedTensors> find_known(const Call& call) const;
  // The tensors of a call as the checks of this or an earlier plan's run left them.
  std::shared_ptr<const CheckedTensors> tensors_of(const Call& call, PyObject* const* arguments);
  std::shared_ptr<const CheckedTensors> check_tensors(const Call& call,
                                                      PyObject* const* arguments) const;
  bool looks_like(const CheckedTensors& checked, const Call& call) const;
  // True if these tensors contain all tokens and pages of the plan.
  bool holds_plan(const CheckedTensors& checked) const;
  bool records(const Call& call) const;
  // Reads a segment's request, holds on to tensors that callers hold, too, and adds to the buffers.
  PlannedSegmentMemory segment_memory(int segment);
  pybind11::object ask(const pybind11::object& function, PyObject* const* arguments) const;
  // Returns a segment's results; fills in the addresses of tensors that it allocates. blank: a new
  // out starts as zeros and a new lse as -inf, for the rows that the kernel does not write.
  pybind11::object make_outputs(const BoundSegment& bound, bool blank,
                                CalledSegment* segment) const;
  void* follow_stream();
  bool launch(const std::shared_ptr<Bound>& bound, const RunArguments& arguments,
              const pybind11::object& partials) const;
  bool start(Bound& bound, RunArguments arguments, const pybind11::object& partials) const;
  bool start_now(Bound& bound, RunArguments arguments) const;

  pybind11::object backend_;
  std::shared_ptr<const Plan> plan_;
  int num_segments_;
  pybind11::tuple requests_;
  bool converts_;  // the queries of every run, from Request.q_given
  std::shared_ptr<Workspace> workspace_;
  std::shared_ptr<PlanBuffer> plan_buffer_;
  std::vector<std::shared_ptr<Buffer>> buffers_;
  std::vector<PlannedSegmentMemory> memory_;  // of each segment
  std::shared_ptr<RunSettings> settings_;
  std::optional<PinnedAddresses> held_;
  std::atomic<void*> stream_;  // stream of the last run
  Guard guard_;                // guards bound_
  std::vector<std::shared_ptr<Bound>> bound_;
};

}  // namespace preflash
