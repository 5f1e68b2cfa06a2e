// How a call from Python starts a launch.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "core/launch.h"

namespace preflash {

// extras: null, or those that this run has.
SegmentArguments segment_arguments(Address q, Address k, Address v, Address o, Address lse,
                                   float sm_scale, float out_scale, float lse_scale,
                                   const RunExtras* extras);

// Without the interpreter's lock being held. Throws what a signal handler raised meanwhile.
bool run_interruptibly(Launch& launch, const RunArguments& arguments);

Address address_of(PyObject* value);
float float_of(PyObject* value);

// A launch, and what says on how many threads of the CPU it runs; None: not on the CPU.
struct Starter {
  pybind11::object owner;
  Launch* launch = nullptr;
  pybind11::object num_threads;

  static Starter of(const pybind11::object& launch, const pybind11::object& num_threads);

  // With the interpreter's lock, which others get meanwhile. Whether it was captured.
  bool start(RunArguments arguments) const;
};

}  // namespace preflash
