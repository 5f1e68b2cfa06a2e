// Host side of a launch that takes more shared memory than a kernel gets unasked.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "preflash/variant.h"

namespace preflash {

struct LaunchShape {
  int ctas = 0;
  int threads = 0;
  int smem_bytes = 0;
  int cluster = 1;  // CTAs of a cluster
};

// Raises the kernel's shared-memory limit, once per device.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<std::uint64_t> done{0};  // a bit per device
  int device;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

template <auto kKernel, class Params>
LaunchError launch_kernel(const Params& params, const LaunchShape& shape, void* stream) {
  cudaError_t error = allow_shared_memory<kKernel>(shape.smem_bytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.ctas);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute cluster{.id = cudaLaunchAttributeClusterDimension};
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = shape.cluster > 1 ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kKernel, params);
  }
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();  // or the next launch of this thread would be blamed
  return cudaGetErrorString(error);
}

}  // namespace preflash
