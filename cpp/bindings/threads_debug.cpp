// The CPU backend's threads as tests see them: `_core.threads`. Nothing in the package itself calls
// this.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/device.h"
#include "cpu/thread_pool.h"

namespace preflash {
namespace {

namespace py = pybind11;

// A job of `count` indices that each sleep so long. Which thread ran each of them, as numbers that
// mean the same thread in every job; the index `fails_at` throws.
std::vector<std::size_t> run(int count, int num_threads, int microseconds, int fails_at) {
  check_num_threads(num_threads);
  std::vector<std::size_t> ran(count);
  cpu::parallel_for(count, num_threads, [&](int index) {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    ran[index] = std::hash<std::thread::id>()(std::this_thread::get_id());
    if (index == fails_at) throw std::runtime_error("index " + std::to_string(index) + " failed");
  });
  return ran;
}

}  // namespace

void bind_threads_debug(py::module_& module) {
  py::module_ m = module.def_submodule("threads", "The CPU backend's threads, for tests.");
  m.def("run", &run, py::arg("count"), py::arg("num_threads"), py::arg("microseconds") = 0,
        py::arg("fails_at") = -1, py::call_guard<py::gil_scoped_release>());
}

}  // namespace preflash
