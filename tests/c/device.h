/* Memory that preflash computes on: the CPU's, or with -DWITH_CUDA a GPU's. */
#include <stdlib.h>
#include <string.h>
#ifdef WITH_CUDA
#include <cuda_runtime.h>
enum { DEVICE = 0 };
static void* device_memory(size_t bytes) {
  void* address = NULL;
  if (cudaMalloc(&address, bytes + 16) != cudaSuccess) abort();
  return address;
}
static void copy(void* to, const void* from, size_t bytes) {
  if (cudaMemcpy(to, from, bytes, cudaMemcpyDefault) != cudaSuccess) abort();
}
static void device_free(void* address) { cudaFree(address); }
#else
enum { DEVICE = -1 };
static void* device_memory(size_t bytes) { /* exactly so many: AddressSanitizer sees the next one */
  void* address = NULL;
  if (posix_memalign(&address, 128, bytes ? bytes : 1) != 0) abort();
  return address;
}
static void copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
static void device_free(void* address) { free(address); }
#endif
