// The few driver functions that the device guard needs (driver_function.h).
#pragma once

#include <cuda.h>

#include "preflash/variant.h"

namespace preflash {

struct DriverApi {
  decltype(&::cuInit) init = nullptr;
  decltype(&::cuDeviceGet) device_get = nullptr;
  decltype(&::cuCtxGetCurrent) context_get_current = nullptr;
  decltype(&::cuCtxSetCurrent) context_set_current = nullptr;
  decltype(&::cuCtxGetDevice) context_get_device = nullptr;
  decltype(&::cuDevicePrimaryCtxRetain) primary_context_retain = nullptr;

  bool complete() const {
    return init && device_get && context_get_current && context_set_current && context_get_device &&
           primary_context_retain;
  }
};

// The driver, initialised; nullptr where there is none. Looked up once per process.
const DriverApi* driver_api();

// The primary context of `device`, the one that the runtime and torch use. Retained once, never
// released.
LaunchError primary_context(const DriverApi& driver, int device, CUcontext* context);

}  // namespace preflash
