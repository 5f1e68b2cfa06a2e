// Host side of one fa3 kernel: its registry entry and its launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "kernels/sm90/forward_kernel.cuh"

namespace preflash::sm90 {

// Raises the kernel's shared-memory limit, once per device.
template <class V>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<std::uint64_t> done{0};  // a bit per device
  int device;
  if (cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  std::uint64_t bit = device < 64 ? std::uint64_t{1} << device : 0;
  if (done.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  cudaError_t error =
      cudaFuncSetAttribute(&forward_kernel<V>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

template <class V>
LaunchError launch_forward(const ForwardParams& params, int num_ctas, void* stream) {
  using Traits = ForwardTraits<V>;
  constexpr int kSmemBytes = sizeof(SharedStorage<Traits>);
  HopperParams hopper{KernelParams::make(params, V::kVariant.logits),
                      box_shape(params, Traits::kTileM, Traits::kTileN),
                      rows_per_tile(Family::kSm90, Traits::kTileM, params.group_size),
                      {}};
  const char* refusal = encode_tensor_maps(params, V::kVariant.q_dtype, hopper.box, hopper.maps);
  if (refusal != nullptr) return refusal;
  cudaError_t error = allow_shared_memory<V>(kSmemBytes);
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_ctas);
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = kSmemBytes;
    config.stream = static_cast<cudaStream_t>(stream);
    error = cudaLaunchKernelEx(&config, forward_kernel<V>, hopper);
  }
  if (error == cudaSuccess) return nullptr;
  (void)cudaGetLastError();  // or the next launch of this thread would be blamed
  return cudaGetErrorString(error);
}

template <class V>
ForwardKernel forward_kernel_entry() {
  return {V::kId, V::kVariant, V::kTile, static_cast<int>(sizeof(SharedStorage<ForwardTraits<V>>)),
          &launch_forward<V>};
}

}  // namespace preflash::sm90
