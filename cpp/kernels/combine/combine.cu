// Each warp makes a part of one output row: every lane walks the row's chunks with a few columns,
// the first loads before the weights are known. Rows past the request's end cost nothing, so that a
// decode tile with 4 valid rows of 64 moves 4 rows.
//
// Deterministic: chunks are added in order by one lane, whatever the kernel, the grid and the rest
// of the batch.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/combine/combine.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/element_io.cuh"
#include "kernels/common/sink.cuh"

namespace preflash {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 8;

// Columns of a lane, and chunks whose loads it has in flight together. Few rows have many chunks: a
// long row of a decode step. Many rows, of a long prompt, have few.
struct FewRows {
  static constexpr int kWidth = 2;
  static constexpr int kBatch = 16;
};
struct ManyRows {
  static constexpr int kWidth = 4;
  static constexpr int kBatch = 4;
};

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

// The largest of a row's terms of its log-sum-exp; 0 where all are -inf, so that no difference is
// NaN. keyless: base 2, a term without a value; -inf: none.
__device__ __forceinline__ PartialLse largest_term(const PartialRow& row, float keyless, int lane) {
  PartialLse largest{.high = 0.0f, .low = keyless};
  for (int chunk = lane; chunk < row.num_chunks; chunk += kWarpSize) {
    largest = larger(largest, row.lse[chunk * row.stride_lse]);
  }
  largest = warp_max(largest);
  return largest.low == -INFINITY ? PartialLse{} : largest;
}

// One lane's columns of one chunk.
template <int kWidth>
struct Columns {
  float of[kWidth] = {};

  // Read once: evict first, the next layer's K and V want the cache.
  __device__ __forceinline__ void load(const float* source) {
    using Vector = std::conditional_t<kWidth == 4, float4, float2>;
    const Vector loaded = __ldcs(reinterpret_cast<const Vector*>(source));
    of[0] = loaded.x;
    of[1] = loaded.y;
    if constexpr (kWidth == 4) {
      of[2] = loaded.z;
      of[3] = loaded.w;
    }
  }
};

template <int kWidth, int kBatch>
__device__ __forceinline__ void load_batch(Columns<kWidth> (&batch)[kBatch], const PartialRow& row,
                                           int first_chunk) {
  const float* source = row.o + first_chunk * row.stride_o;
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    batch[i] = {};
    if (row.has_columns && first_chunk + i < row.num_chunks) batch[i].load(source);
    source += row.stride_o;
  }
}

// The sum of a row's weights, and of O by them in this lane's columns. Both in the order of the
// chunks: one without keys changes no bit, so it does not matter with which chunk a tile begins.
template <int kWidth>
struct RowSums {
  float weights = 0.0f;  // 0: no key in any chunk, and no logit beside the keys'
  Columns<kWidth> o = {};
};

// `batch` holds the first chunks already.
template <int kWidth, int kBatch>
__device__ __forceinline__ RowSums<kWidth> add_chunks(Columns<kWidth> (&batch)[kBatch],
                                                      const PartialRow& row, const PartialLse& base,
                                                      int lane) {
  RowSums<kWidth> sums;
  for (int first_chunk = 0; first_chunk < row.num_chunks; first_chunk += kBatch) {
    if (first_chunk > 0) load_batch(batch, row, first_chunk);
    // Lane i holds the weight of chunk first_chunk + i % kBatch.
    const int chunk = first_chunk + lane % kBatch;
    const float weight =
        chunk < row.num_chunks ? exp2f(difference(row.lse[chunk * row.stride_lse], base)) : 0.0f;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float of_chunk = __shfl_sync(kAllLanes, weight, i);
      sums.weights += of_chunk;
#pragma unroll
      for (int c = 0; c < kWidth; ++c) {
        sums.o.of[c] = fmaf(of_chunk, batch[i].of[c], sums.o.of[c]);
      }
    }
  }
  return sums;
}

struct TileRow {
  int row;
  int packed_row;  // of the request
  int stride;      // partial rows from a chunk to the next
};

template <class T, class Shape>
__device__ __forceinline__ void combine_row(const CombineParams& params, const MergeItem& merge,
                                            const RequestInfo& request, TileRow place, int column) {
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t first_row = std::int64_t{merge.first_row} + place.row;
  const PartialRow row{
      .o = params.partial_o + first_row * params.head_dim_vo + column,
      .stride_o = std::int64_t{place.stride} * params.head_dim_vo,
      .lse = params.partial_lse + first_row,
      .stride_lse = place.stride,
      .num_chunks = merge.num_chunks,
      .has_columns = column < params.head_dim_vo,
  };
  Columns<Shape::kWidth> batch[Shape::kBatch];
  load_batch(batch, row, 0);

  const int group_size = params.grid.group_size;
  const std::int64_t token = request.qo_begin + place.packed_row / group_size;
  const std::int64_t head =
      std::int64_t{merge.kv_head} * group_size + place.packed_row % group_size;
  const float keyless =
      has_keyless(params.extras) ? sink(params.extras, static_cast<int>(head)) : -INFINITY;
  const PartialLse base = largest_term(row, keyless, lane);
  RowSums<Shape::kWidth> sums = add_chunks(batch, row, base, lane);
  sums.weights += exp2f(difference({.high = 0.0f, .low = keyless}, base));

  if (row.has_columns) {
    const float factor = sums.weights == 0.0f ? 0.0f : 1.0f / sums.weights;
    T* o = static_cast<T*>(params.o.data) + token * params.o.stride_token +
           head * params.o.stride_head + column;
    Pack<T, Shape::kWidth> out;
#pragma unroll
    for (int c = 0; c < Shape::kWidth; ++c)
      out.element[c] = from_float<T>(fmaf(sums.o.of[c], factor, 0.0f));
    *reinterpret_cast<Pack<T, Shape::kWidth>*>(o) = out;
  }
  if (column == 0 && params.lse.data != nullptr) {
    const float lse =
        sums.weights == 0.0f ? -INFINITY : base.high + (base.low + log2f(sums.weights));
    params.lse.data[token * params.lse.stride_token + head * params.lse.stride_head] =
        lse * params.lse.scale;
  }
}

// blockIdx.x: the merge item; the CTAs of blockIdx.y share its rows.
// NOTE: the plan is read before the partials are complete: it was there when the forward kernel,
// which lets this one begin early, began itself.
template <class T, class Shape>
__global__ void __launch_bounds__(kWarps* kWarpSize) combine_kernel(const CombineParams params) {
  const MergeItem merge = params.merges[blockIdx.x];
  RequestInfo request = params.requests[merge.request];
  if (const std::int32_t* kv_lens = params.extras.kv_lens; params.grid.aligned && kv_lens) {
    request = with_keys(request, __ldg(kv_lens + merge.request));
  }
  const QueryRows rows = params.grid.rows(request, merge.row_begin);
  const int stride = params.grid.partial_rows(request, rows);
  const int column_blocks = ceil_div(params.head_dim_vo, kWarpSize * Shape::kWidth);
  const int warp = threadIdx.x / kWarpSize;
  const int lane_column = threadIdx.x % kWarpSize * Shape::kWidth;
  wait_for_kernel_before();
  for (int unit = blockIdx.y * kWarps + warp; unit < rows.count * column_blocks;
       unit += gridDim.y * kWarps) {
    const int row = unit / column_blocks;
    combine_row<T, Shape>(params, merge, request,
                          {.row = row, .packed_row = rows.begin + row, .stride = stride},
                          unit % column_blocks * kWarpSize * Shape::kWidth + lane_column);
  }
}

template <class Shape>
cudaError_t launch_shape(const CombineParams& params, int num_sms, cudaStream_t stream) {
  // One pass over a tile where there are few of them; with many, fewer CTAs each, since most of a
  // decode tile's rows are empty and a CTA that finds nothing to do still costs its launch.
  constexpr int kCtasPerSm = 4;
  const int units =
      params.grid.rows_per_tile * ceil_div(params.head_dim_vo, kWarpSize * Shape::kWidth);
  const int ctas_per_merge =
      std::clamp(ceil_div(num_sms * kCtasPerSm, params.num_merges), 1, ceil_div(units, kWarps));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.num_merges, ctas_per_merge);
  config.blockDim = dim3(kWarps * kWarpSize);
  config.stream = stream;
  auto launch = [&](auto tag) {
    return launch_early<&combine_kernel<typename decltype(tag)::type, Shape>>(config, params);
  };
  if (params.o_dtype == DType::kFloat8E4M3) return launch(TypeTag<__nv_fp8_e4m3>{});
  return dispatch_element(params.o_dtype, launch);
}

}  // namespace

cudaError_t launch_combine(const CombineParams& params, int num_sms, cudaStream_t stream) {
  // A tall tile has a warp for each of its rows.
  constexpr int kTallRows = 64;
  const bool many = params.grid.rows_per_tile >= kTallRows && params.num_merges >= num_sms;
  return many ? launch_shape<ManyRows>(params, num_sms, stream)
              : launch_shape<FewRows>(params, num_sms, stream);
}

}  // namespace preflash
