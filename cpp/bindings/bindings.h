// pybind11 lives in this directory only: convert, call, return. Pointers, strides and streams cross
// the border as integers, so that one kernel build serves every version of Python and of torch.
#pragma once

#include <pybind11/pybind11.h>

namespace preflash {

void bind_batch(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_ops(pybind11::module_& m);
void bind_introspection(pybind11::module_& m);
void bind_planner_debug(pybind11::module_& m);
void bind_threads_debug(pybind11::module_& m);

}  // namespace preflash
