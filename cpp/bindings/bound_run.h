// A placed plan and the launches bound to it: run() is one call for every layer. Each combination
// of shapes, strides, dtypes and devices is checked once.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/given_segment.h"
#include "bindings/guard.h"
#include "bindings/place.h"

namespace preflash {

// Python functions for the rare paths of a run. Each gets the run's context first. NOTE: the
// context must not hold the run.
struct RunFunctions {
  pybind11::object check;           // (arguments of run): numbers and BoundSegment of each segment
  pybind11::object refuse;          // (arguments of run): raises where a gradient or trace is lost
  pybind11::object stream_changed;  // called before a run on another stream than the last run's
  pybind11::object copy;            // (buffer, array, most), without context: see upload()
};

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

// Settings and checked tensors that the runs of plans with the same options and layouts share.
struct RunSettings {
  std::shared_ptr<const RunFunctions> functions;
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

// Thread-safe: any number of threads may call run() at once.
class BoundRun : public std::enable_shared_from_this<BoundRun> {
 public:
  // context: of settings' functions: the requests and names of the segments, the buffers and the
  // device's stream (_run.variant.PlannedVariant).
  BoundRun(std::shared_ptr<Place> place, std::shared_ptr<const Plan> plan,
           std::shared_ptr<RunSettings> settings, pybind11::tuple context);

  // Starts the copies of the runs' work lists to the device, and of `copies` with the first. runs:
  // at least one, of one batch. Releases the GIL meanwhile.
  static void upload(const std::vector<std::shared_ptr<BoundRun>>& runs, void* stream,
                     std::vector<HostCopy> copies);
  const Torch& torch() const { return torch_; }
  const RunFunctions& functions() const { return *settings_->functions; }

  // arguments: GivenSegment's, for each segment. Raises every error of the wrapper's run() about
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
    CalledSegment(const GivenSegment& given, const SeenSegment& seen) : given(given), seen(seen) {}

    GivenSegment given;
    SeenSegment seen;
  };
  struct Call {
    std::optional<CalledSegment> in_place[kMaxSegments];
    std::shared_ptr<Bound> bound;

    CalledSegment& segment(int s) { return *in_place[s]; }
    const CalledSegment& segment(int s) const { return *in_place[s]; }
  };

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
  // Reads a segment's request, and holds on to tensors that callers hold, too.
  PlannedSegmentMemory segment_memory(int segment, pybind11::handle request);
  pybind11::object ask(const pybind11::object& function, PyObject* const* arguments) const;
  // Returns a segment's results; fills in the addresses of tensors that it allocates. blank: a new
  // out starts as zeros and a new lse as -inf, for the rows that the kernel does not write.
  pybind11::object make_outputs(const BoundSegment& bound, bool blank,
                                CalledSegment* segment) const;
  void* current_stream() const;
  void* follow_stream();
  bool launch(const std::shared_ptr<Bound>& bound, const RunArguments& arguments,
              const pybind11::object& partials) const;
  bool start(Bound& bound, RunArguments arguments, const pybind11::object& partials) const;
  bool start_now(Bound& bound, RunArguments arguments) const;

  std::shared_ptr<Place> place_;
  const Torch& torch_;
  std::shared_ptr<const Plan> plan_;
  int num_segments_;
  std::vector<PlannedSegmentMemory> memory_;  // of each segment
  std::shared_ptr<RunSettings> settings_;
  pybind11::tuple context_;
  HeldMemory held_;
  std::atomic<void*> stream_;  // stream of the last run
  Guard guard_;                // guards bound_
  std::vector<std::shared_ptr<Bound>> bound_;
};

}  // namespace preflash
