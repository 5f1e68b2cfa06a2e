// Host side of one fa2 kernel: its registry entry and its launch.
#pragma once

#include <cuda_runtime.h>

#include "kernels/sm80/forward_kernel.cuh"

namespace preflash::sm80 {

template <class V>
LaunchError launch_forward(const ForwardParams& params, int num_ctas, void* stream) {
  using Traits = ForwardTraits<V>;
  constexpr int kSmemBytes = sizeof(SharedStorage<Traits>);
  auto* kernel = &forward_kernel<V>;
  // Per device, and cheap enough (0.1 us) not to be remembered.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
  if (error == cudaSuccess) {
    KernelParams kernel_params = KernelParams::make(params, V::kVariant.logits);
    kernel<<<num_ctas, Traits::kThreads, kSmemBytes, static_cast<cudaStream_t>(stream)>>>(
        kernel_params);
    error = cudaGetLastError();
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <class V>
ForwardKernel forward_kernel_entry() {
  return {V::kId, V::kVariant, V::kTile, static_cast<int>(sizeof(SharedStorage<ForwardTraits<V>>)),
          &launch_forward<V>};
}

}  // namespace preflash::sm80
