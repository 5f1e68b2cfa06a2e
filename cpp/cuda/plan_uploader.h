// Pinned staging between the planner and the GPU's int workspace.
//
//   plan n    acquire(A)  write  submit: copy A, event A
//   plan n+1  acquire(B)  write  submit: copy B, event B      while A's copy may still be in flight
//   plan n+2  acquire(A): waits for event A, then write …
//
// The host waits only when two uploads are in flight already.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <span>

#include "cuda/pinned_memory.h"
#include "preflash/device_services.h"

namespace preflash {

struct PlanUploader {
  // Touches no device: the first acquire does.
  explicit PlanUploader(int device) : device_(device) {}
  // Waits for copies in flight. Safe at interpreter shutdown: errors are ignored.
  ~PlanUploader();
  PlanUploader(const PlanUploader&) = delete;
  PlanUploader& operator=(const PlanUploader&) = delete;

  LaunchError acquire(std::size_t bytes, void** host);
  LaunchError submit(std::span<const StagedCopy> parts, const PerSegment<ArrayCopy>& arrays,
                     cudaStream_t stream);
  // The last submit's copy is not over before what `stream`, which is that copy's, has been given
  // since.
  LaunchError extend(cudaStream_t stream);
  // `stream` waits, on the device, for every copy in flight.
  LaunchError join(cudaStream_t stream);

 private:
  int device_;
  std::array<PinnedMemory, 2> stagings_;
  std::size_t next_ = 0;            // the staging that acquire hands out
  std::size_t acquired_bytes_ = 0;  // 0: nothing acquired since the last submit
};

}  // namespace preflash
