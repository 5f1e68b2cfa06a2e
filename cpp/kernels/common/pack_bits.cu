// One thread makes one byte out of eight elements, four bytes per thread and step. A segment may
// begin at any element, so that only segments on 8-byte boundaries take the wide load.
#include "kernels/common/pack_bits.h"
#include "preflash/types.h"

namespace preflash {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;
constexpr int kTileBytes = kThreads * kUnroll;

// The segment that output byte `byte` belongs to, at or after `segment`: the last one that begins
// at or before it. Empty segments begin where the next one does, and so are never the last.
__device__ __forceinline__ int find_segment(const PackBitsParams& params, int segment,
                                            std::int64_t byte) {
  int low = segment;
  int high = params.num_segments;
  while (high - low > 1) {
    int middle = low + (high - low) / 2;
    if (params.out_begin[middle] <= byte) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Elements [0, count) of x as the bytes of a word, the first one lowest; the others are zero.
__device__ __forceinline__ std::uint64_t load_elements(const std::uint8_t* x, int count) {
  if (count == 8 && reinterpret_cast<std::uintptr_t>(x) % 8 == 0) {
    return *reinterpret_cast<const std::uint64_t*>(x);
  }
  std::uint64_t word = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < count) word |= std::uint64_t{x[i]} << (8 * i);
  }
  return word;
}

// Byte i of the word, non-zero or not, becomes bit i.
__device__ __forceinline__ unsigned int pack_word(std::uint64_t word) {
  constexpr std::uint64_t kLowSeven = 0x7f7f7f7f7f7f7f7full;
  const std::uint64_t non_zero = ((((word & kLowSeven) + kLowSeven) | word) & ~kLowSeven) >> 7;
  // Bit 8i times 2^(56 - 7i) lands at 56 + i; no two products of the other pairs meet there.
  return static_cast<unsigned int>((non_zero * 0x0102040810204080ull) >> 56);
}

__global__ void __launch_bounds__(kThreads) pack_bits_kernel(const PackBitsParams params) {
  const std::int64_t end = params.out_begin[params.num_segments];
  const std::int64_t step = std::int64_t{gridDim.x} * kTileBytes;
  std::int64_t first = params.out_begin[0] + std::int64_t{blockIdx.x} * kTileBytes + threadIdx.x;
  int segment = 0;
  for (; first < end; first += step) {
    std::uint64_t word[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t byte = first + i * kThreads;
      word[i] = 0;
      if (byte >= end) continue;
      segment = find_segment(params, segment, byte);
      const std::int64_t element =
          params.in_begin[segment] + (byte - params.out_begin[segment]) * 8;
      const std::int64_t left = params.in_begin[segment + 1] - element;
      if (left > 0) word[i] = load_elements(params.x + element, left < 8 ? left : 8);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t byte = first + i * kThreads;
      if (byte >= end) continue;
      const unsigned int bits = pack_word(word[i]);
      params.packed[byte] = static_cast<std::uint8_t>(params.little ? bits : __brev(bits) >> 24);
    }
  }
}

}  // namespace

cudaError_t launch_pack_bits(const PackBitsParams& params, int num_sms, cudaStream_t stream) {
  constexpr int kCtasPerSm = 8;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_sms * kCtasPerSm);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, pack_bits_kernel, params);
}

}  // namespace preflash
