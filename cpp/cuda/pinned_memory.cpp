#include "cuda/pinned_memory.h"

#include <algorithm>

#include "cuda/launch_error.h"

namespace preflash {
namespace {

constexpr std::size_t kFirstCapacity = std::size_t{64} << 10;

}  // namespace

void PinnedMemory::release(int device) {
  if (copied_ == nullptr) return;  // never used: no device was touched
  DeviceGuard guard(device);
  if (guard.error() != nullptr) return;
  RelaxedCaptureScope relaxed;
  if (in_flight_) cudaEventSynchronize(copied_);
  cudaEventDestroy(copied_);
  if (host_ != nullptr) cudaFreeHost(host_);
  cudaGetLastError();
}

LaunchError PinnedMemory::reserve(std::size_t bytes) {
  RelaxedCaptureScope relaxed;
  if (LaunchError error = wait_for_copy()) return error;
  if (copied_ == nullptr) {
    cudaError_t status = cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming);
    if (status != cudaSuccess) return runtime_error(status, "plan upload: creating an event");
  }
  return capacity_ < bytes ? grow(bytes) : nullptr;
}

LaunchError PinnedMemory::wait_for_copy() {
  // A query of a complete event takes a fraction of the time of a wait for it.
  if (is_free()) return nullptr;
  cudaError_t status = cudaEventSynchronize(copied_);
  if (status != cudaSuccess) return runtime_error(status, "plan upload: waiting for a copy");
  in_flight_ = false;
  return nullptr;
}

bool PinnedMemory::is_free() {
  if (!in_flight_) return true;
  RelaxedCaptureScope relaxed;
  in_flight_ = cudaEventQuery(copied_) != cudaSuccess;
  if (in_flight_) cudaGetLastError();
  return !in_flight_;
}

LaunchError PinnedMemory::copy_to(std::span<const StagedCopy> parts, cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  if (in_flight_) {
    status = cudaStreamWaitEvent(stream, copied_, 0);
    if (status != cudaSuccess) return runtime_error(status, "plan upload: ordering two copies");
  }
  for (const StagedCopy& part : parts) {
    if (part.bytes == 0) continue;
    const std::byte* from = static_cast<const std::byte*>(host_) + part.begin;
    status = cudaMemcpyAsync(part.to, from, part.bytes, cudaMemcpyHostToDevice, stream);
    if (status != cudaSuccess) {
      extend(stream);  // earlier parts may be on their way
      return runtime_error(status, "plan upload: copying to the device");
    }
  }
  return extend(stream);
}

LaunchError PinnedMemory::extend(cudaStream_t stream) {
  cudaError_t status = cudaEventRecord(copied_, stream);
  if (status != cudaSuccess) {
    cudaStreamSynchronize(stream);
    return runtime_error(status, "plan upload: recording an event");
  }
  in_flight_ = true;
  return nullptr;
}

LaunchError PinnedMemory::grow(std::size_t bytes) {
  std::size_t capacity = std::max(kFirstCapacity, capacity_);
  while (capacity < bytes) capacity *= 2;
  void* host = nullptr;
  cudaError_t status = cudaHostAlloc(&host, capacity, cudaHostAllocDefault);
  if (status != cudaSuccess) return runtime_error(status, "plan upload: allocating pinned memory");
  if (host_ != nullptr) cudaFreeHost(host_);
  host_ = host;
  capacity_ = capacity;
  return nullptr;
}

LaunchError PinnedArray::reserve(std::size_t bytes, void** host) {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  const std::lock_guard lock(mutex_);
  if (LaunchError error = memory_.reserve(bytes)) return error;
  *host = memory_.host();
  return nullptr;
}

bool PinnedArray::is_free() {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return false;
  const std::lock_guard lock(mutex_);
  return memory_.is_free();
}

LaunchError PinnedArray::copy_to(void* device_memory, std::size_t bytes, cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  const StagedCopy whole{.to = device_memory, .bytes = bytes};
  return memory_.copy_to({&whole, 1}, stream);
}

}  // namespace preflash
