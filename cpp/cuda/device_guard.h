// Makes a device current for a scope and gives the caller's back afterwards.
#pragma once

#include <cuda.h>

#include "preflash/variant.h"

namespace preflash {

// Contexts, not cudaSetDevice: a thread that has used no device yet remains so. In contrast
// cudaSetDevice(previous) would open a context on device 0 (hundreds of MB, and a wrong
// current device for torch, whose own runtime reads the thread's context). Any current
// context of the wanted device stays, even one that is not primary: its streams belong to it.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  // nullptr: the device is current.
  LaunchError error() const { return error_; }

 private:
  LaunchError error_ = nullptr;
  CUcontext previous_ = nullptr;
  bool switched_ = false;
};

}  // namespace preflash
