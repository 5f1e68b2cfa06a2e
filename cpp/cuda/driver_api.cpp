#include "cuda/driver_api.h"

#include <array>
#include <atomic>

#include "cuda/launch_error.h"

namespace preflash {
namespace {

constexpr int kMaxDevices = 64;

template <class Function>
void resolve(const char* symbol, Function* function) {
  // CUDA 12.0 is the oldest driver interface that we use; its version also fixes each signature.
  [[maybe_unused]] constexpr unsigned int kInterfaceVersion = 12000;
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  cudaError_t status = cudaGetDriverEntryPointByVersion(symbol, &address, kInterfaceVersion,
                                                        cudaEnableDefault, &found);
#else
  cudaError_t status = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) cudaGetLastError();
  if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) {
    *function = reinterpret_cast<Function>(address);
  }
}

DriverApi load_driver() {
  DriverApi driver;
  resolve("cuInit", &driver.init);
  resolve("cuDeviceGet", &driver.device_get);
  resolve("cuCtxGetCurrent", &driver.context_get_current);
  resolve("cuCtxSetCurrent", &driver.context_set_current);
  resolve("cuCtxGetDevice", &driver.context_get_device);
  resolve("cuDevicePrimaryCtxRetain", &driver.primary_context_retain);
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
