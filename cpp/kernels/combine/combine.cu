// Each warp makes 64 columns of one output row: every lane walks the row's chunks with two columns,
// 16 loads of 8 bytes in flight, the first ones before the weights are known. Rows past the
// request's end cost nothing, so that a decode tile with 4 valid rows of 64 moves 4 rows.
//
// Deterministic: chunks are added in order by one lane, whatever the grid and the rest of the
// batch.
#include <algorithm>
#include <cmath>

#include "kernels/combine/combine.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/element_io.cuh"
#include "kernels/common/sink.cuh"

namespace preflash {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 8;
constexpr int kWidth = 2;  // columns of one lane
constexpr int kWarpColumns = kWarpSize * kWidth;
constexpr int kBatch = 16;  // chunks whose loads are in flight together
constexpr unsigned int kAllLanes = 0xffffffffu;

// The partials of one packed row: chunk i lies i strides further.
struct PartialRow {
  const float* o;  // this lane's columns in the first chunk
  std::int64_t stride_o;
  const PartialLse* lse;
  std::int64_t stride_lse;
  int num_chunks;
  bool has_columns;  // false: the lane is past head_dim_vo
};

// a - b, where their high parts may leave no bits for the low ones.
__device__ __forceinline__ float difference(const PartialLse& a, const PartialLse& b) {
  return (a.high - b.high) + (a.low - b.low);
}

// -inf - -inf, of two states without a key, is NaN, and not larger.
__device__ __forceinline__ PartialLse larger(const PartialLse& a, const PartialLse& b) {
  return difference(b, a) > 0.0f ? b : a;
}

__device__ __forceinline__ PartialLse warp_max(PartialLse value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    PartialLse other{.high = __shfl_xor_sync(kAllLanes, value.high, step),
                     .low = __shfl_xor_sync(kAllLanes, value.low, step)};
    value = larger(value, other);
  }
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, step);
  }
  return value;
}

// The row's log-sum-exp is base + log2(sum), and chunk i's share is 2^(lse[i] - base) / sum.
struct RowSum {
  PartialLse base;  // the largest term; 0 where all are -inf, so that no difference is NaN
  float sum;        // 0: no key in any chunk, and no logit beside the keys'

  __device__ float weight(const PartialLse& lse) const { return exp2f(difference(lse, base)); }
  __device__ float lse() const {
    return sum == 0.0f ? -INFINITY : base.high + (base.low + log2f(sum));
  }
  __device__ float inverse() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
};

// keyless: base 2, one more term of the sum, without a value; -inf: none.
__device__ __forceinline__ RowSum sum_chunks(const PartialRow& row, float keyless, int lane) {
  PartialLse largest{.high = 0.0f, .low = -INFINITY};
  for (int chunk = lane; chunk < row.num_chunks; chunk += kWarpSize) {
    largest = larger(largest, row.lse[chunk * row.stride_lse]);
  }
  // Every lane adds it to the warp's results, so that it counts once.
  const PartialLse keyless_lse{.high = 0.0f, .low = keyless};
  largest = larger(warp_max(largest), keyless_lse);
  RowSum total{.base = largest.low == -INFINITY ? PartialLse{} : largest, .sum = 0.0f};
  float sum = 0.0f;
  for (int chunk = lane; chunk < row.num_chunks; chunk += kWarpSize) {
    sum += total.weight(row.lse[chunk * row.stride_lse]);
  }
  total.sum = warp_sum(sum) + total.weight(keyless_lse);
  return total;
}

__device__ __forceinline__ void load_batch(float2 (&batch)[kBatch], const PartialRow& row,
                                           int first_chunk) {
  const float* source = row.o + first_chunk * row.stride_o;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    bool wanted = row.has_columns && first_chunk + i < row.num_chunks;
    // Read once: evict first, the next layer's K and V want the cache.
    batch[i] = wanted ? __ldcs(reinterpret_cast<const float2*>(source)) : make_float2(0.0f, 0.0f);
    source += row.stride_o;
  }
}

// The row's weighted mean in this lane's columns. `batch` holds the first chunks already.
__device__ __forceinline__ float2 weighted_mean(float2 (&batch)[kBatch], const PartialRow& row,
                                                const RowSum& total, int lane) {
  const float inverse = total.inverse();
  float2 mean = make_float2(0.0f, 0.0f);
  for (int first_chunk = 0; first_chunk < row.num_chunks; first_chunk += kBatch) {
    if (first_chunk > 0) load_batch(batch, row, first_chunk);
    // Lane i holds the weight of chunk first_chunk + i % kBatch.
    int chunk = first_chunk + lane % kBatch;
    float weight =
        chunk < row.num_chunks ? total.weight(row.lse[chunk * row.stride_lse]) * inverse : 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float share = __shfl_sync(kAllLanes, weight, i);
      mean.x = fmaf(share, batch[i].x, mean.x);
      mean.y = fmaf(share, batch[i].y, mean.y);
    }
  }
  return mean;
}

struct TileRow {
  int row;
  int num_rows;  // of the tile
};

template <class T>
__device__ __forceinline__ void combine_row(const CombineParams& params, const MergeItem& merge,
                                            const RequestInfo& request, TileRow place, int column) {
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t first_row = std::int64_t{merge.first_row} + place.row;
  const PartialRow row{
      .o = params.partial_o + first_row * params.head_dim_vo + column,
      .stride_o = std::int64_t{place.num_rows} * params.head_dim_vo,
      .lse = params.partial_lse + first_row,
      .stride_lse = place.num_rows,
      .num_chunks = merge.num_chunks,
      .has_columns = column < params.head_dim_vo,
  };
  float2 batch[kBatch];
  load_batch(batch, row, 0);

  const int packed_row = merge.row_begin + place.row;
  const int head_in_group = packed_row % params.group_size;
  const std::int64_t token = request.qo_begin + packed_row / params.group_size;
  const std::int64_t head = std::int64_t{merge.kv_head} * params.group_size + head_in_group;
  const float keyless =
      has_keyless(params.extras) ? sink(params.extras, static_cast<int>(head)) : -INFINITY;
  const RowSum total = sum_chunks(row, keyless, lane);
  const float2 mean = weighted_mean(batch, row, total, lane);

  if (row.has_columns) {
    T* o = static_cast<T*>(params.o.data) + token * params.o.stride_token +
           head * params.o.stride_head + column;
    *reinterpret_cast<Pack<T, kWidth>*>(o) = {from_float<T>(mean.x), from_float<T>(mean.y)};
  }
  if (column == 0 && params.lse.data != nullptr) {
    params.lse.data[token * params.lse.stride_token + head * params.lse.stride_head] =
        total.lse() * params.lse.scale;
  }
}

// blockIdx.x: the merge item; the CTAs of blockIdx.y share its rows.
// NOTE: the plan is read before the partials are complete: it was there when the forward kernel,
// which lets this one begin early, began itself.
template <class T>
__global__ void __launch_bounds__(kWarps* kWarpSize) combine_kernel(const CombineParams params) {
  const MergeItem merge = params.merges[blockIdx.x];
  const RequestInfo request = params.requests[merge.request];
  const std::int64_t rows_left = std::int64_t{request.qo_len} * params.group_size - merge.row_begin;
  const int num_rows = static_cast<int>(min(std::int64_t{params.tile_rows}, rows_left));
  const int column_blocks = ceil_div(params.head_dim_vo, kWarpColumns);
  const int warp = threadIdx.x / kWarpSize;
  const int lane_column = threadIdx.x % kWarpSize * kWidth;
  wait_for_kernel_before();
  for (int unit = blockIdx.y * kWarps + warp; unit < num_rows * column_blocks;
       unit += gridDim.y * kWarps) {
    combine_row<T>(params, merge, request, {.row = unit / column_blocks, .num_rows = num_rows},
                   unit % column_blocks * kWarpColumns + lane_column);
  }
}

}  // namespace

cudaError_t launch_combine(const CombineParams& params, int num_sms, cudaStream_t stream) {
  // One pass over a tile where there are few of them; with many, fewer CTAs each, since most of a
  // decode tile's rows are empty and a CTA that finds nothing to do still costs its launch.
  constexpr int kCtasPerSm = 4;
  const int units = params.tile_rows * ceil_div(params.head_dim_vo, kWarpColumns);
  const int ctas_per_merge =
      std::clamp(ceil_div(num_sms * kCtasPerSm, params.num_merges), 1, ceil_div(units, kWarps));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.num_merges, ctas_per_merge);
  config.blockDim = dim3(kWarps * kWarpSize);
  config.stream = stream;
  auto launch = [&](auto tag) {
    return launch_early<&combine_kernel<typename decltype(tag)::type>>(config, params);
  };
  if (params.o_dtype == DType::kFloat8E4M3) return launch(TypeTag<__nv_fp8_e4m3>{});
  return dispatch_element(params.o_dtype, launch);
}

}  // namespace preflash
