// Programmatic dependent launch: the combine kernel is launched, and has read its part of the plan,
// when the forward kernel before it ends. Runs do not overlap: a forward kernel begins when
// everything before it on the stream is complete.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace preflash {

// Lets the next kernel of launch_early() start on free SMs once all CTAs have called this.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the kernel before this one is complete and its writes are visible. NOTE: every thread
// must call it, or the kernel after this one could begin before the kernel before has ended.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// True if a kernel that waits may begin early on the current device. Code for GPUs before SM90 does
// not wait, even if a newer GPU compiles it from PTX, and drivers before CUDA 12.3 capture no such
// launches into graphs.
inline bool can_begin_early(const void* kernel) {
  constexpr int kFirstCapability = 90;
  constexpr int kFirstDriver = 12030;
  cudaFuncAttributes attributes;
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver >= kFirstDriver &&
      cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) {
    return attributes.ptxVersion >= kFirstCapability;
  }
  (void)cudaGetLastError();  // or the next launch of this thread would be blamed
  return false;
}

// Returns can_begin_early(), queried once per device.
template <auto kKernel>
bool begins_early() {
  static std::atomic<std::uint64_t> known{0};  // a bit per device
  static std::atomic<std::uint64_t> early{0};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  const std::uint64_t bit = std::uint64_t{1} << device;
  if (!(known.load(std::memory_order_acquire) & bit)) {
    if (can_begin_early(reinterpret_cast<const void*>(kKernel))) early.fetch_or(bit);
    known.fetch_or(bit, std::memory_order_release);
  }
  return early.load(std::memory_order_relaxed) & bit;
}

// Launches kKernel, which calls wait_for_kernel_before(), as early as it can begin.
template <auto kKernel, class Params>
cudaError_t launch_early(cudaLaunchConfig_t config, const Params& params) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  if (begins_early<kKernel>()) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kKernel, params);
}

}  // namespace preflash
