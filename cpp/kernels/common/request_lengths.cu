#include "kernels/common/request_lengths.h"
#include "preflash/request_lengths.h"

namespace preflash {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) set_lengths_kernel(const RequestLengths lengths) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < lengths.num_requests) set_length(lengths, i, lengths.requests[i]);
}

}  // namespace

cudaError_t launch_set_lengths(const RequestLengths& lengths, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ceil_div(lengths.num_requests, kThreads));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, set_lengths_kernel, lengths);
}

}  // namespace preflash
