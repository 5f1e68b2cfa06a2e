#include "core/device.h"

#include <map>
#include <mutex>
#include <string>

#include "cpu/cpu_backend.h"
#include "registry/registry.h"

namespace preflash {

const DeviceServices& services_of(int device) {
  if (device == kCpuDevice) return *cpu_device_services();
  const DeviceServices* cuda = Registry::instance().cuda();
  if (cuda == nullptr) {
    throw NotCompiledError("CUDA device " + std::to_string(device) +
                           " cannot be used: " + Registry::instance().cuda_error());
  }
  return *cuda;
}

const DeviceFacts& facts_of(int device) {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> known;  // a map: references stay valid as it grows
  const DeviceServices& services = services_of(device);
  std::scoped_lock lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    DeviceFacts facts;
    check_launch(services.query(device, &facts), "device query");
    found = known.emplace(device, facts).first;
  }
  return found->second;
}

void check_launch(LaunchError error, const char* what) {
  if (error != nullptr) throw std::runtime_error(std::string(what) + " failed: " + error);
}

void check_num_threads(int num_threads) {
  if (num_threads >= 1) return;
  throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                              "; must be at least 1, the calling thread");
}

}  // namespace preflash
