// preflash_harness: built for the tests and in no wheel.
#include "harness/harness.h"

PYBIND11_MODULE(preflash_harness, m, pybind11::mod_gil_not_used()) {
  m.doc() = "The planner and the threads of preflash's CPU backend, on their own.";
  preflash::bind_planner(m);
  preflash::bind_threads(m);
}
