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
  pybind11::object stream;          // address of the current stream
  pybind11::object stream_changed;  // called before a run on another stream than the last run's
};

// Python hooks for the start of a launch.
struct Starting {
  pybind11::object num_threads;  // called for every launch; None: not on the CPU
  pybind11::object launched_by;  // called with each launch, which says whether it was captured,
                                 // instead of starting it; None: started
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

// Checked tensors of plans with the same options and layouts, for the next such plan() to reuse.
// Each plan compares its own lengths with them.
struct KnownTensors {
  Guard guard;
  std::vector<std::shared_ptr<const CheckedTensors>> checked;
};

// Thread-safe: any number of threads may call run() at once.
class BoundRun : public std::enable_shared_from_this<BoundRun> {
 public:
  // memory: the plan's own, of each segment. largest_pages: the largest page index of each; -1: not
  // known here, or ragged.
  BoundRun(std::shared_ptr<Place> place, std::shared_ptr<const Plan> plan,
           std::vector<RunMemory> memory, std::vector<std::int64_t> largest_pages,
           std::shared_ptr<KnownTensors> known, std::shared_ptr<const RunFunctions> functions,
           pybind11::object context, Starting starting);

  // Registers a tensor that the plan uses and callers also hold. Launches check its memory.
  void hold(std::string name, const pybind11::object& tensor, std::int64_t bytes) {
    held_.hold(std::move(name), tensor,
               {.address = torch_.address_of(tensor.ptr()), .bytes = bytes});
  }

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
  std::vector<RunMemory> memory_;  // of each segment
  std::vector<std::int64_t> largest_pages_;
  std::shared_ptr<KnownTensors> known_;
  std::shared_ptr<const RunFunctions> functions_;
  pybind11::object context_;
  Starting starting_;
  HeldMemory held_;
  std::atomic<void*> stream_;  // stream of the last run
  Guard guard_;                // guards bound_
  std::vector<std::shared_ptr<Bound>> bound_;
};

}  // namespace preflash
