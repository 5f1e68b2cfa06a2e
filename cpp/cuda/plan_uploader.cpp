#include "cuda/plan_uploader.h"

#include <algorithm>

#include "cuda/device_guard.h"
#include "cuda/launch_error.h"

namespace preflash {
namespace {

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
  for (PinnedMemory& staging : stagings_) staging.release(device_);
}

LaunchError PlanUploader::acquire(std::size_t bytes, void** host) {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  PinnedMemory& staging = stagings_[next_];
  bytes = std::max<std::size_t>(bytes, 1);
  if (LaunchError error = staging.reserve(bytes)) return error;
  acquired_bytes_ = bytes;
  *host = staging.host();
  return nullptr;
}

LaunchError PlanUploader::submit(std::span<const StagedCopy> parts,
                                 const PerSegment<ArrayCopy>& arrays, cudaStream_t stream) {
  std::size_t end = 1;
  for (const StagedCopy& part : parts) end = std::max(end, part.begin + part.bytes);
  if (acquired_bytes_ < end) {
    return usage_error("plan upload: submit of %zu bytes after an acquire of %zu", end,
                       acquired_bytes_);
  }
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  if (LaunchError error = refuse_capture(stream)) return error;
  // NOTE: the pinned memory comes last: join() waits for its event alone, which must cover all
  // copies.
  for (const ArrayCopy& array : arrays) {
    if (LaunchError error = array.from->copy_to(array.to, array.bytes, stream)) return error;
  }
  PinnedMemory& staging = stagings_[next_];
  next_ = 1 - next_;
  acquired_bytes_ = 0;
  return staging.copy_to(parts, stream);
}

LaunchError PlanUploader::extend(cudaStream_t stream) {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  PinnedMemory& staging = stagings_[1 - next_];
  if (!staging.in_flight()) return usage_error("plan upload: nothing was submitted");
  return staging.extend(stream);
}

LaunchError PlanUploader::join(cudaStream_t stream) {
  DeviceGuard guard(device_);
  if (guard.error() != nullptr) return guard.error();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const bool may_wait = cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
                        capture == cudaStreamCaptureStatusNone;
  cudaGetLastError();
  RelaxedCaptureScope relaxed;
  for (PinnedMemory& staging : stagings_) {
    if (!staging.in_flight()) continue;
    if (!may_wait) {
      // A capture cannot depend on an event from outside of it; its replays come after this wait.
      if (LaunchError error = staging.wait_for_copy()) return error;
      continue;
    }
    // The event may belong to a later copy than the plan's. Then the plan's copy is complete,
    // because acquire() waited for it before it handed the pinned memory out again.
    cudaError_t status = cudaStreamWaitEvent(stream, staging.copied(), 0);
    if (status != cudaSuccess) {
      return runtime_error(status, "plan upload: ordering a stream behind a copy");
    }
  }
  return nullptr;
}

}  // namespace preflash
