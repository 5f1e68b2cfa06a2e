// The shared libraries of a build of every fa2 kernel, without CUDA: tables that plans can be made
// with, on GPUs whose facts PREFLASH_GPU_FACTS gives. tests/host/test_devices.py compiles it with
// the generated sources and a fake_smem.inl, lines of {"id", bytes}.
#include <string_view>
#include <utility>

#include "preflash/device_services.h"

namespace preflash {

int smem_bytes_of(std::string_view id) {
  static constexpr std::pair<std::string_view, int> kBytes[] = {
#include "fake_smem.inl"
  };
  for (const auto& [name, bytes] : kBytes) {
    if (name == id) return bytes;
  }
  return 0;
}

}  // namespace preflash

extern "C" __attribute__((visibility("default"))) const preflash::DeviceServices*
preflash_device_services() {
  using namespace preflash;
  static const DeviceServices services{
      .cuda_version = "fake",
      .device_count = [] { return 1; },
      .query = [](int device, DeviceFacts* facts) -> LaunchError {
        *facts = {.device = device, .l2_bytes = 40 << 20, .name = "fake"};
        return nullptr;
      },
  };
  return &services;
}
