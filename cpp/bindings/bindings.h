// pybind11 lives in this directory only: convert, call, return. Pointers, strides and streams cross
// the border as integers, so that one kernel build serves every version of Python and of torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace preflash {

using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

void bind_batch(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_introspection(pybind11::module_& m);

}  // namespace preflash
