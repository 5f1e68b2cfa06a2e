// The service table of a device ordinal, and the device's facts. Ordinal -1 is the CPU.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "preflash/device_services.h"

namespace preflash {

inline constexpr int kCpuDevice = -1;

// Becomes NotImplementedError in Python: a variant or a library that was not compiled.
struct NotCompiledError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws NotCompiledError with the registry's sentence where there are no CUDA libraries.
const DeviceServices& services_of(int device);

// Asked for once per device and remembered.
const DeviceFacts& facts_of(int device);

// Throws std::runtime_error naming `what` when a launch was refused.
void check_launch(LaunchError error, const char* what);

// Throws std::invalid_argument for less than one.
void check_num_threads(int num_threads);

}  // namespace preflash
