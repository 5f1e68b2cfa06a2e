// Pinned host memory, and the event of the copy that last read it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <span>

#include "cuda/device_guard.h"
#include "preflash/device_services.h"

namespace preflash {

// Allocating or freeing pinned memory while any stream of the process is being captured would break
// that capture under CUDA's default rules, although it has nothing to do with it: a plan on another
// thread, or a wrapper collected by Python's garbage collector in the middle of a capture.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope() { exchanged_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess; }
  ~RelaxedCaptureScope() {
    if (exchanged_) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool exchanged_ = false;
};

// The caller makes the device current. Only release(), which an owner calls in its destructor,
// makes the device current by itself.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  // Frees it once a copy in flight is over. Safe at interpreter shutdown: errors are ignored.
  void release(int device);
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  void* host() const { return host_; }
  cudaEvent_t copied() const { return copied_; }
  bool in_flight() const { return in_flight_; }

  // Makes room for `bytes` that no copy reads; earlier contents are lost.
  LaunchError reserve(std::size_t bytes);
  LaunchError wait_for_copy();
  // True if no copy is in flight.
  bool is_free();
  // Starts copies of these parts; their event covers all earlier copies as well.
  LaunchError copy_to(std::span<const StagedCopy> parts, cudaStream_t stream);
  // Extends the copy by all work given to `stream` so far.
  LaunchError extend(cudaStream_t stream);

 private:
  LaunchError grow(std::size_t bytes);

  void* host_ = nullptr;
  std::size_t capacity_ = 0;
  cudaEvent_t copied_ = nullptr;  // recorded after the copy that last read `host_`
  bool in_flight_ = false;
};

// Pinned array of a batch, which plans of several wrappers may share.
struct PinnedArray {
 public:
  explicit PinnedArray(int device) : device_(device) {}
  ~PinnedArray() { memory_.release(device_); }
  PinnedArray(const PinnedArray&) = delete;
  PinnedArray& operator=(const PinnedArray&) = delete;

  LaunchError reserve(std::size_t bytes, void** host);
  bool is_free();
  // The caller has made the device current.
  LaunchError copy_to(void* device_memory, std::size_t bytes, cudaStream_t stream);

 private:
  const int device_;
  std::mutex mutex_;
  PinnedMemory memory_;
};

}  // namespace preflash
