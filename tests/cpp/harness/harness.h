// The parts of preflash that Python cannot reach through the package, for its tests.
#pragma once

#include <pybind11/pybind11.h>

namespace preflash {

void bind_planner(pybind11::module_& module);
void bind_threads(pybind11::module_& module);

}  // namespace preflash
