#include "core/device.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "cpu/cpu_backend.h"
#include "registry/registry.h"

namespace preflash {

namespace {

// Facts of another GPU, which tests put in the place of this one's: kernels that need more are
// refused, and those that fit run. PREFLASH_GPU_FACTS="smem_per_block=101376,smem_per_sm=102400".
void override_facts(DeviceFacts& facts) {
  const char* value = std::getenv("PREFLASH_GPU_FACTS");
  if (value == nullptr) return;
  const std::pair<std::string_view, int*> fields[] = {
      {"compute_capability", &facts.compute_capability},
      {"num_sms", &facts.num_sms},
      {"smem_per_block", &facts.smem_per_block},
      {"smem_per_sm", &facts.smem_per_sm}};
  std::istringstream given(value);
  for (std::string part; std::getline(given, part, ',');) {
    const std::size_t equals = part.find('=');
    const std::string_view name = std::string_view(part).substr(0, equals);
    const auto* field = std::ranges::find(fields, name, &std::pair<std::string_view, int*>::first);
    const int number = equals == std::string::npos ? 0 : std::atoi(part.c_str() + equals + 1);
    if (field == std::end(fields) || number <= 0) {
      throw std::invalid_argument("PREFLASH_GPU_FACTS=" + std::string(value) + ": '" + part +
                                  "' must be compute_capability, num_sms, smem_per_block or "
                                  "smem_per_sm, and = a positive number");
    }
    *field->second = number;
  }
}

}  // namespace

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
    if (device != kCpuDevice) override_facts(facts);
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
