// preflash._core: the planner, the registry and the launches, as Python sees them.
#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "core/device.h"

PYBIND11_MODULE(_core, m, pybind11::mod_gil_not_used()) {
  m.doc() =
      "Planner, registry and launches of preflash. Private: use preflash.prefill and its peers.";
  // pybind11 itself makes ValueError of std::invalid_argument.
  pybind11::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const preflash::NotCompiledError& error) {
      pybind11::set_error(PyExc_NotImplementedError, error.what());
    }
  });
  preflash::bind_introspection(m);
  preflash::bind_torch(m);
  preflash::bind_batch(m);
  preflash::bind_plan(m);
  preflash::bind_run_memory(m);
  preflash::bind_workspace(m);
  preflash::bind_run(m);
  preflash::bind_host_arrays(m);
  preflash::bind_repeated_plan(m);
  preflash::bind_ops(m);
  preflash::bind_trace(m);
}
