// The CPU backend's threads as tests see them: `preflash_harness.threads`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/device.h"
#include "cpu/thread_pool.h"
#include "harness/harness.h"

namespace preflash {
namespace {

namespace py = pybind11;

// A job of `count` indices that each sleep so long; the index `fails_at` throws. Which thread ran
// each of them, as numbers that mean the same thread in every job, and how many ran at once.
py::dict run(int count, int num_threads, int microseconds, int fails_at) {
  check_num_threads(num_threads);
  std::vector<std::size_t> threads(count);
  std::atomic<int> now{0}, most{0};
  {
    py::gil_scoped_release release;
    cpu::parallel_for(count, num_threads, [&](int index) {
      const int running = ++now;
      for (int seen = most; seen < running && !most.compare_exchange_weak(seen, running);) {
      }
      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
      threads[index] = std::hash<std::thread::id>()(std::this_thread::get_id());
      --now;
      if (index == fails_at) throw std::runtime_error("index " + std::to_string(index) + " failed");
    });
  }
  py::dict seen;
  seen["threads"] = threads;
  seen["most_at_once"] = most.load();
  return seen;
}

}  // namespace

void bind_threads(py::module_& module) {
  py::module_ m = module.def_submodule("threads", "The CPU backend's threads, for tests.");
  m.def("run", &run, py::arg("count"), py::arg("num_threads"), py::arg("microseconds") = 0,
        py::arg("fails_at") = -1);
}

}  // namespace preflash
