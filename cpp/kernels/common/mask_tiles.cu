// One CTA makes one word, of sixteen tiles, at a time: it looks through the bits of a tile's tokens
// at the keys of sixteen tiles. A thread has 32 of these keys, of some of the tokens. Tiles have
// multiples of 16 keys, so each half of them is one tile's.
#include "kernels/common/mask.cuh"
#include "kernels/common/mask_tiles.h"

namespace preflash {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 8;
constexpr int kWordKeys = 32;
constexpr int kHalfKeys = kWordKeys / 2;

// The request that word `word` belongs to: the last that begins at or before it.
__device__ __forceinline__ int find_request(const MaskTilesParams& params, std::int64_t word) {
  int low = 0;
  int high = params.num_requests;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (params.mask_tiles_begin[middle] <= word) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Bits of a thread's keys, collected over its tokens.
struct Seen {
  std::uint32_t some = 0;     // a token sees the key
  std::uint32_t missing = 0;  // a token does not see the key

  __device__ __forceinline__ Seen of_half(int half) const {
    const std::uint32_t keys = 0xffffu << half * kHalfKeys;
    return {some & keys, missing & keys};
  }
};

__device__ __forceinline__ Seen look(const MaskTilesParams& params, const RequestInfo& request,
                                     RowSpan tokens, int first_key, int step) {
  Seen seen;
  const int keys = min(request.kv_len - first_key, kWordKeys);
  if (keys <= 0) return seen;
  const std::uint8_t* bits = params.mask_bits + request.mask_begin;
  for (int token = tokens.first; token <= tokens.last; token += kUnroll * step) {
    MaskWords words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t row = min(token + i * step, tokens.last);  // or the last one once more
      words[i] = load_mask_words(bits, row * request.kv_len + first_key);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      seen.some |= words[i].bits();
      seen.missing |= ~words[i].bits();
    }
  }
  const std::uint32_t owned = 0xffffffffu >> (kWordKeys - keys);
  return {seen.some & owned, seen.missing & owned};
}

__global__ void __launch_bounds__(kThreads) mask_tiles_kernel(const MaskTilesParams params) {
  __shared__ std::uint32_t some;
  __shared__ std::uint32_t missing;
  const int tile_keys = params.shape.tile_keys;
  const int columns = MaskTiles::kWordTiles * tile_keys / kWordKeys;
  const int step = kThreads / columns;  // threads that share a column
  const int column = threadIdx.x % columns;
  const int share = threadIdx.x / columns;
  const std::int64_t end = params.mask_tiles_begin[params.num_requests];
  for (std::int64_t word = blockIdx.x; word < end; word += gridDim.x) {
    if (threadIdx.x == 0) some = missing = 0;
    __syncthreads();
    const int index = find_request(params, word);
    const RequestInfo request = params.requests[index];
    const std::int64_t in_request = word - params.mask_tiles_begin[index];
    const std::int64_t row_words = params.shape.row_words(request);
    RowSpan tokens = params.shape.tokens(request, in_request / row_words);
    const int first_tile = static_cast<int>(in_request % row_words) * MaskTiles::kWordTiles;
    tokens.first += share;
    if (share < step) {
      const Seen seen =
          look(params, request, tokens, first_tile * tile_keys + column * kWordKeys, step);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int tile = (column * kWordKeys + half * kHalfKeys) / tile_keys;
        const std::uint32_t tile_bit = 1u << tile * MaskTiles::kBits;
        if (seen.of_half(half).some != 0) atomicOr(&some, tile_bit);
        if (seen.of_half(half).missing != 0) atomicOr(&missing, tile_bit);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) params.words[word] = MaskTiles::word_of(some, missing);
  }
}

}  // namespace

cudaError_t launch_mask_tiles(const MaskTilesParams& params, int num_sms, cudaStream_t stream) {
  constexpr int kCtasPerSm = 8;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_sms * kCtasPerSm);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, mask_tiles_kernel, params);
}

}  // namespace preflash
