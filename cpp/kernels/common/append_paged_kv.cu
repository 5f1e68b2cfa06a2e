// Rows of new tokens into the slots of a paged cache. K and V are the two rows of the grid; a group
// of 1 to 32 neighbouring lanes copies one token, pack by pack.
#include <algorithm>
#include <cstdint>

#include "kernels/common/append_paged_kv.h"
#include "preflash/page_slot.h"

namespace preflash {
namespace {

constexpr int kThreads = 128;
constexpr int kWarpSize = 32;
constexpr int kBatch = 4;  // packs whose loads are in flight together

// One pack of a token: its head, and its byte within the head's row.
template <class Pack>
struct PackPlace {
  int head;
  int byte;

  __device__ PackPlace(const AppendedRows& rows, int pack) {
    const int packs_per_row = rows.row_bytes / static_cast<int>(sizeof(Pack));
    head = pack / packs_per_row;
    byte = (pack - head * packs_per_row) * static_cast<int>(sizeof(Pack));
  }
};

template <class Pack>
__device__ __forceinline__ void copy_token(const AppendedRows& rows, const std::uint8_t* from,
                                           std::uint8_t* to, int lane, int lanes) {
  const int packs = rows.num_heads * (rows.row_bytes / static_cast<int>(sizeof(Pack)));
  for (int first = lane; first < packs; first += lanes * kBatch) {
    Pack value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pack = first + i * lanes;
      if (pack >= packs) break;
      const PackPlace<Pack> place(rows, pack);
      value[i] = *reinterpret_cast<const Pack*>(from + place.head * rows.rows_head + place.byte);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pack = first + i * lanes;
      if (pack >= packs) break;
      const PackPlace<Pack> place(rows, pack);
      *reinterpret_cast<Pack*>(to + place.head * rows.pool_head + place.byte) = value[i];
    }
  }
}

template <class Pack>
__global__ void __launch_bounds__(kThreads)
    append_paged_kv_kernel(const __grid_constant__ AppendParams params, int log2_lanes) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t token = thread >> log2_lanes;
  if (token >= params.num_tokens) return;
  const PageSlot slot = page_slot(params, token);
  if (slot.page < 0) return;
  const AppendedRows& rows = blockIdx.y == 0 ? params.k : params.v;
  const int lanes = 1 << log2_lanes;
  copy_token<Pack>(rows, rows.rows + token * rows.rows_token, rows.pool + slot.offset_in(rows),
                   static_cast<int>(thread) & (lanes - 1), lanes);
}

// Heads that lie one after the other on both sides are one long row, without a division for each
// pack.
AppendedRows joined_heads(AppendedRows rows) {
  if (rows.rows_head == rows.row_bytes && rows.pool_head == rows.row_bytes) {
    rows.row_bytes *= rows.num_heads;
    rows.num_heads = 1;
  }
  return rows;
}

// The largest pack that every row begins at a multiple of and is a multiple of.
std::uint64_t common_bits(const AppendedRows& rows) {
  return reinterpret_cast<std::uint64_t>(rows.rows) | reinterpret_cast<std::uint64_t>(rows.pool) |
         static_cast<std::uint64_t>(rows.rows_token) | static_cast<std::uint64_t>(rows.rows_head) |
         static_cast<std::uint64_t>(rows.pool_page) | static_cast<std::uint64_t>(rows.pool_slot) |
         static_cast<std::uint64_t>(rows.pool_head) | static_cast<std::uint64_t>(rows.row_bytes);
}

template <class Pack>
cudaError_t launch_with_pack(const AppendParams& params, cudaStream_t stream) {
  const auto packs = [](const AppendedRows& rows) {
    return rows.num_heads * (rows.row_bytes / static_cast<int>(sizeof(Pack)));
  };
  const int most_packs = std::max(packs(params.k), packs(params.v));
  int log2_lanes = 0;
  while ((1 << log2_lanes) < kWarpSize && (1 << log2_lanes) < most_packs) ++log2_lanes;
  const std::int64_t num_threads = params.num_tokens << log2_lanes;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>((num_threads + kThreads - 1) / kThreads), 2);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, append_paged_kv_kernel<Pack>, params, log2_lanes);
}

}  // namespace

cudaError_t launch_append_paged_kv(const AppendParams& given, cudaStream_t stream) {
  AppendParams params = given;
  params.k = joined_heads(given.k);
  params.v = joined_heads(given.v);
  const std::uint64_t bits = common_bits(params.k) | common_bits(params.v);
  if (bits % sizeof(uint4) == 0) return launch_with_pack<uint4>(params, stream);
  if (bits % sizeof(uint2) == 0) return launch_with_pack<uint2>(params, stream);
  if (bits % sizeof(std::uint32_t) == 0) return launch_with_pack<std::uint32_t>(params, stream);
  if (bits % sizeof(std::uint16_t) == 0) return launch_with_pack<std::uint16_t>(params, stream);
  return launch_with_pack<std::uint8_t>(params, stream);
}

}  // namespace preflash
