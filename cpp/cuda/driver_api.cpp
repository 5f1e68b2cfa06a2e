#include "cuda/driver_api.h"

#include <array>
#include <atomic>

#include "cuda/driver_function.h"
#include "cuda/launch_error.h"

namespace preflash {
namespace {

constexpr int kMaxDevices = 64;

DriverApi load_driver() {
  DriverApi driver;
  find_driver_function("cuInit", &driver.init);
  find_driver_function("cuDeviceGet", &driver.device_get);
  find_driver_function("cuCtxGetCurrent", &driver.context_get_current);
  find_driver_function("cuCtxSetCurrent", &driver.context_set_current);
  find_driver_function("cuCtxGetDevice", &driver.context_get_device);
  find_driver_function("cuDevicePrimaryCtxRetain", &driver.primary_context_retain);
  if (driver.complete() && driver.init(0) != CUDA_SUCCESS) driver = {};
  return driver;
}

}  // namespace

const DriverApi* driver_api() {
  static const DriverApi driver = load_driver();
  return driver.complete() ? &driver : nullptr;
}

LaunchError primary_context(const DriverApi& driver, int device, CUcontext* context) {
  // Written once per device. Two threads may both retain; the count of a context that is never
  // released does not matter.
  static std::array<std::atomic<CUcontext>, kMaxDevices> cache = {};
  if (device < 0 || device >= kMaxDevices) {
    return usage_error("device %d: devices are numbered from 0, and at most %d are supported",
                       device, kMaxDevices);
  }
  *context = cache[device].load(std::memory_order_acquire);
  if (*context != nullptr) return nullptr;

  CUdevice handle = 0;
  CUresult status = driver.device_get(&handle, device);
  if (status == CUDA_SUCCESS) status = driver.primary_context_retain(context, handle);
  if (status != CUDA_SUCCESS) return driver_error(status, "opening the device");
  cache[device].store(*context, std::memory_order_release);
  return nullptr;
}

}  // namespace preflash
