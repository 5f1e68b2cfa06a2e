// How a call from Python starts a launch.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "bindings/run_memory.h"
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

// Looks at what the plan left in memory, and where the float workspace is; None: the plan has none.
void use_memory(const HeldMemory& held, pybind11::handle float_workspace, RunArguments* arguments);

// A launch, and what says on how many threads of the CPU it runs; None: not on the CPU.
struct Starter {
  pybind11::object owner;
  Launch* launch = nullptr;
  std::shared_ptr<const HeldMemory> memory;
  pybind11::object num_threads;

  static Starter of(const pybind11::object& launch, std::shared_ptr<const HeldMemory> memory,
                    const pybind11::object& num_threads);

  // With the interpreter's lock, which others get meanwhile. Whether it was captured.
  bool start(RunArguments arguments, pybind11::handle float_workspace) const;
};

}  // namespace preflash
