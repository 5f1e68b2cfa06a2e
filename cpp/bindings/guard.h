// What threads of Python share in C++. The interpreter's lock guards it; where the interpreter has
// none (3.14t), a mutex does.
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

// What `make` makes of objects of Python, once for each such call, and for as long as the process
// lives. A static variable of its own would keep other threads waiting while the interpreter waits
// for those.
template <class T, class Make>
const T& made_once(Make&& make) {
  PYBIND11_CONSTINIT static pybind11::gil_safe_call_once_and_store<T> kept;
  return kept.call_once_and_store_result(std::forward<Make>(make)).get_stored();
}

}  // namespace preflash
