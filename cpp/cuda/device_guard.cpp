#include "cuda/device_guard.h"

#include "cuda/driver_api.h"
#include "cuda/launch_error.h"

namespace preflash {

DeviceGuard::DeviceGuard(int device) {
  const DriverApi* driver = driver_api();
  if (driver == nullptr) {
    error_ =
        usage_error("device %d: no CUDA driver on this machine, or one older than CUDA 12", device);
    return;
  }
  CUresult status = driver->context_get_current(&previous_);
  if (status != CUDA_SUCCESS) {
    error_ = driver_error(status, "reading the current device");
    return;
  }
  CUdevice current = -1;
  CUdevice wanted = -1;
  if (previous_ != nullptr && driver->context_get_device(&current) == CUDA_SUCCESS &&
      driver->device_get(&wanted, device) == CUDA_SUCCESS && current == wanted) {
    return;
  }
  CUcontext context = nullptr;
  error_ = primary_context(*driver, device, &context);
  if (error_ != nullptr) return;
  status = driver->context_set_current(context);
  if (status != CUDA_SUCCESS) {
    error_ = driver_error(status, "making the device current");
    return;
  }
  switched_ = true;
}

DeviceGuard::~DeviceGuard() {
  // Nothing can be done about an error here; the driver may be unloading.
  if (switched_) driver_api()->context_set_current(previous_);
}

}  // namespace preflash
