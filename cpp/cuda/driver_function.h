// A driver function by its name, found at run time: nothing here links against libcuda, so that the
// library loads on a machine without a driver.
#pragma once

#include <cuda_runtime_api.h>

namespace preflash {

// Leaves *function as it is where the driver has no such function.
template <class Function>
void find_driver_function(const char* symbol, Function* function) {
  // CUDA 12.0 is the oldest driver interface that we use; its version also fixes each signature.
  [[maybe_unused]] constexpr unsigned int kInterfaceVersion = 12000;
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  cudaError_t status = cudaGetDriverEntryPointByVersion(symbol, &address, kInterfaceVersion,
                                                        cudaEnableDefault, &found);
#else
  cudaError_t status = cudaGetDriverEntryPoint(symbol, &address, cudaEnableDefault, &found);
#endif
  if (status != cudaSuccess) cudaGetLastError();  // clears it: the next launch must not report it
  if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) {
    *function = reinterpret_cast<Function>(address);
  }
}

}  // namespace preflash
