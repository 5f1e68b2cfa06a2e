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
  pybind11::object check;   // (arguments of run): the numbers of BoundSegment, of each segment
  pybind11::object refuse;  // (arguments of run): raises where a gradient or trace is lost
  pybind11::object stream;  // the address of the current one
  pybind11::object stream_changed;  // before the first run on another stream than the last one's
};

// How launches start.
struct Starting {
  pybind11::object num_threads;  // called for every launch; None: not on the CPU
  pybind11::object launched_by;  // called with each launch, which says whether it was captured,
                                 // instead of starting it; None: started
};

// What checks found out about the tensors of one segment.
struct BoundSegment {
  std::int64_t v_offset;      // bytes, where K and V are halves of one tensor
  pybind11::object make_out;  // of q
  pybind11::object make_lse;
};

// Tensors that have passed the checks of a run, by what they look like.
struct CheckedTensors {
  PerSegment<SegmentFacts> facts;
  PerSegment<RunTensors> tensors;
  std::vector<BoundSegment> segments;
};

// Those of plans with the same options and layouts: the next plan() finds them here. Each plan's
// own lengths are compared with them.
struct KnownTensors {
  Guard guard;
  std::vector<std::shared_ptr<const CheckedTensors>> checked;
};

// Any number of threads may run it at once.
class BoundRun : public std::enable_shared_from_this<BoundRun> {
 public:
  // memory: the plan's own, of each segment. largest_pages: the largest page index of each; -1: not
  // known here, or ragged.
  BoundRun(std::shared_ptr<Place> place, std::shared_ptr<const Plan> plan,
           std::vector<RunMemory> memory, std::vector<std::int64_t> largest_pages,
           std::shared_ptr<KnownTensors> known, std::shared_ptr<const RunFunctions> functions,
           pybind11::object context, Starting starting);

  // The plan keeps something in a tensor that callers also hold, and runs look for it there.
  void hold(std::string name, const pybind11::object& tensor, std::int64_t bytes) {
    held_.hold(std::move(name), tensor,
               {.address = torch_.address_of(tensor.ptr()), .bytes = bytes});
  }

  // arguments: those of GivenSegment, for each segment. Raises all that a run() raises of its
  // tensors; returns what it returns.
  pybind11::object run(PyObject* const* arguments, Py_ssize_t count);
  // The checks of it alone.
  void check(PyObject* const* arguments, Py_ssize_t count);

  // Of the plan that this thread ran last; "" before the first run.
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
  // Null: none yet.
  std::shared_ptr<Bound> find_bound(const Call& call);
  std::shared_ptr<Bound> bound_to(const Call& call, PyObject* const* arguments);
  // Null: no run has checked such tensors yet.
  std::shared_ptr<const CheckedTensors> find_known(const Call& call) const;
  // The tensors of a call as the checks of this or an earlier plan's run left them.
  std::shared_ptr<const CheckedTensors> tensors_of(const Call& call, PyObject* const* arguments);
  std::shared_ptr<const CheckedTensors> check_tensors(const Call& call,
                                                      PyObject* const* arguments) const;
  bool looks_like(const CheckedTensors& checked, const Call& call) const;
  // Whether these tensors contain all tokens and pages of the plan.
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
  std::atomic<void*> stream_;  // of the last run
  Guard guard_;                // of what follows
  std::vector<std::shared_ptr<Bound>> bound_;
};

}  // namespace preflash
