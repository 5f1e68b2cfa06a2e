#include "cuda/plan_uploader.h"

#include <algorithm>

#include "cuda/device_guard.h"
#include "cuda/launch_error.h"

namespace preflash {
namespace {

constexpr std::size_t kFirstCapacity = std::size_t{64} << 10;

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

LaunchError refuse_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaError_t status = cudaStreamIsCapturing(stream, &capture);
  if (status == cudaSuccess && capture == cudaStreamCaptureStatusNone) return nullptr;
  if (status != cudaSuccess && status != cudaErrorStreamCaptureImplicit) {
    return runtime_error(status, "plan upload: asking whether the stream is being captured");
  }
  cudaGetLastError();
  return usage_error(
      "plan() cannot run while its stream is being captured into a CUDA graph: the graph would "
      "replay one copy out of host memory that later plans reuse; call plan() before the capture "
      "and capture run() alone");
}

}  // namespace

PlanUploader::~PlanUploader() {
  if (stagings_[0].copied == nullptr) return;  // never used: no device was touched
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return;
  RelaxedCaptureScope relaxed;
  for (Staging& staging : stagings_) {
    if (staging.in_flight) cudaEventSynchronize(staging.copied);
    if (staging.copied != nullptr) cudaEventDestroy(staging.copied);
    if (staging.host != nullptr) cudaFreeHost(staging.host);
  }
  cudaGetLastError();
}

LaunchError PlanUploader::acquire(std::size_t bytes, void** host) {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  RelaxedCaptureScope relaxed;
  Staging& staging = stagings_[next_];
  if (LaunchError error = wait_for_copy(staging)) return error;
  if (staging.copied == nullptr) {
    cudaError_t status = cudaEventCreateWithFlags(&staging.copied, cudaEventDisableTiming);
    if (status != cudaSuccess) return runtime_error(status, "plan upload: creating an event");
  }
  bytes = std::max<std::size_t>(bytes, 1);
  if (staging.capacity < bytes) {
    if (LaunchError error = grow(staging, bytes)) return error;
  }
  acquired_bytes_ = bytes;
  *host = staging.host;
  return nullptr;
}

LaunchError PlanUploader::submit(void* device_memory, std::size_t bytes, cudaStream_t stream) {
  if (acquired_bytes_ < std::max<std::size_t>(bytes, 1)) {
    return usage_error("plan upload: submit of %zu bytes after an acquire of %zu", bytes,
                       acquired_bytes_);
  }
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  if (LaunchError error = refuse_capture(stream)) return error;

  Staging& staging = stagings_[next_];
  cudaError_t status = cudaSuccess;
  if (bytes > 0) {
    status = cudaMemcpyAsync(device_memory, staging.host, bytes, cudaMemcpyHostToDevice, stream);
    if (status != cudaSuccess) return runtime_error(status, "plan upload: copying to the device");
  }
  // From here on the staging may be in use, even if recording its event fails.
  next_ = 1 - next_;
  acquired_bytes_ = 0;
  status = cudaEventRecord(staging.copied, stream);
  if (status != cudaSuccess) {
    cudaStreamSynchronize(stream);
    return runtime_error(status, "plan upload: recording an event");
  }
  staging.in_flight = true;
  return nullptr;
}

LaunchError PlanUploader::extend(cudaStream_t stream) {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  Staging& staging = stagings_[1 - next_];
  if (!staging.in_flight) return usage_error("plan upload: nothing was submitted");
  cudaError_t status = cudaEventRecord(staging.copied, stream);
  return status == cudaSuccess ? nullptr : runtime_error(status, "plan upload: recording an event");
}

LaunchError PlanUploader::join(cudaStream_t stream) {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const bool may_wait = cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
                        capture == cudaStreamCaptureStatusNone;
  cudaGetLastError();
  RelaxedCaptureScope relaxed;
  for (Staging& staging : stagings_) {
    if (!staging.in_flight) continue;
    if (!may_wait) {
      // A capture cannot depend on an event from outside of it; its replays come after this wait.
      if (LaunchError error = wait_for_copy(staging)) return error;
      continue;
    }
    // NOTE: the event may stand for a later copy than the plan's. The plan's is complete then,
    // because acquire() waited for it before it handed the staging out again.
    cudaError_t status = cudaStreamWaitEvent(stream, staging.copied, 0);
    if (status != cudaSuccess) {
      return runtime_error(status, "plan upload: ordering a stream behind a copy");
    }
  }
  return nullptr;
}

LaunchError PlanUploader::wait_for_copy(Staging& staging) {
  if (!staging.in_flight) return nullptr;
  cudaError_t status = cudaEventSynchronize(staging.copied);
  if (status != cudaSuccess) return runtime_error(status, "plan upload: waiting for a copy");
  staging.in_flight = false;
  return nullptr;
}

LaunchError PlanUploader::grow(Staging& staging, std::size_t bytes) {
  std::size_t capacity = std::max(kFirstCapacity, staging.capacity);
  while (capacity < bytes) capacity *= 2;
  void* host = nullptr;
  cudaError_t status = cudaHostAlloc(&host, capacity, cudaHostAllocDefault);
  if (status != cudaSuccess) return runtime_error(status, "plan upload: allocating pinned memory");
  if (staging.host != nullptr) cudaFreeHost(staging.host);
  staging.host = host;
  staging.capacity = capacity;
  return nullptr;
}

}  // namespace preflash
