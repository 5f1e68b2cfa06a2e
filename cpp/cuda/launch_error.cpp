#include "cuda/launch_error.h"

#include <cstdarg>
#include <cstdio>

namespace preflash {
namespace {

thread_local char error_buffer[512];

}  // namespace

LaunchError usage_error(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_buffer, sizeof(error_buffer), format, arguments);
  va_end(arguments);
  return error_buffer;
}

LaunchError runtime_error(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();
  return usage_error("%s: %s (%s)", what, cudaGetErrorName(status), cudaGetErrorString(status));
}

LaunchError driver_error(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return nullptr;
  return usage_error("%s: CUDA driver error %d", what, static_cast<int>(status));
}

}  // namespace preflash
