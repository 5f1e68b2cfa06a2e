// Guards C++ data that Python threads share: by the interpreter's lock, or by a mutex where the
// interpreter has none (3.14t).
#pragma once

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <mutex>
#include <utility>

namespace preflash {

#ifdef Py_GIL_DISABLED
// NOTE: nothing of Python is called or released while it is locked: a thread that waits for it does
// not stop for the interpreter's collector.
using Guard = std::mutex;
#else
struct Guard {
  void lock() {}
  void unlock() {}
};
#endif

// Calls `make` once per call site and keeps the result, which holds Python objects, for the life of
// the process. NOTE: a plain static variable could deadlock: other threads would wait for it while
// the interpreter waits for them.
template <class T, class Make>
const T& made_once(Make&& make) {
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<T> kept;
  return kept.call_once_and_store_result(std::forward<Make>(make)).get_stored();
}

}  // namespace preflash
