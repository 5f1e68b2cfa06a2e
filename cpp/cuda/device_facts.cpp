#include "cuda/device_facts.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <mutex>
#include <vector>

#include "cuda/launch_error.h"

namespace preflash {
namespace {

struct FactsCache {
  std::mutex mutex;
  std::vector<DeviceFacts> devices;  // device == -1: not read yet
};

// Never destroyed: wrappers may outlive static objects at interpreter shutdown.
FactsCache& facts_cache() {
  static FactsCache& cache = *new FactsCache;
  return cache;
}

LaunchError read_facts(int device, DeviceFacts* facts) {
  cudaDeviceProp properties;
  cudaError_t status = cudaGetDeviceProperties(&properties, device);
  if (status != cudaSuccess) return runtime_error(status, "reading the device's properties");

  DeviceFacts read;
  read.device = device;
  read.compute_capability = properties.major * 10 + properties.minor;
  read.num_sms = properties.multiProcessorCount;
  read.smem_per_block = static_cast<int>(properties.sharedMemPerBlockOptin);
  read.smem_per_sm = static_cast<int>(properties.sharedMemPerMultiprocessor);
  read.l2_bytes = properties.l2CacheSize;
  std::snprintf(read.name, sizeof(read.name), "%.*s", static_cast<int>(sizeof(read.name)) - 1,
                properties.name);
  *facts = read;
  return nullptr;
}

}  // namespace

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

LaunchError query_device(int device, DeviceFacts* facts) {
  FactsCache& cache = facts_cache();
  std::lock_guard lock(cache.mutex);
  if (cache.devices.empty()) cache.devices.resize(device_count());
  if (cache.devices.empty()) {
    int driver = 0;  // 0: there is none
    cudaDriverGetVersion(&driver);
    if (driver > 0 && driver / 1000 < CUDART_VERSION / 1000) {
      return usage_error(
          "device %d: the NVIDIA driver serves CUDA %d.%d at most, and these kernels were built "
          "with CUDA %d.%d: install a newer driver, or a preflash for CUDA %d",
          device, driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
          CUDART_VERSION % 1000 / 10, driver / 1000);
    }
  }
  if (device < 0 || device >= static_cast<int>(cache.devices.size())) {
    return usage_error("device %d does not exist: this machine shows %d CUDA devices", device,
                       static_cast<int>(cache.devices.size()));
  }
  DeviceFacts& cached = cache.devices[device];
  if (cached.device < 0) {
    if (LaunchError error = read_facts(device, &cached)) return error;
  }
  *facts = cached;
  return nullptr;
}

}  // namespace preflash
