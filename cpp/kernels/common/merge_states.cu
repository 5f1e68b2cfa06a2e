// Attention states (v, s) of disjoint key sets become the state of their union: weights 2^s.
//
// One row of head_dim elements per group of 1 to 32 neighbouring lanes. A group never leaves its
// warp, which makes working in place safe: s is written once every lane of the row has read it.
#include <cmath>

#include "kernels/common/element_io.cuh"
#include "kernels/common/merge_states.h"

namespace preflash {
namespace {

constexpr int kThreads = 256;
constexpr int kWarpSize = 32;
constexpr int kBatch = 4;  // states whose loads are in flight together

// The states of one (token, head): two tensors of one state each, or one tensor of many.
template <class T>
struct RowStates {
  const MergeStatesParams& params;
  std::int64_t first;   // the row of the first state
  std::int64_t stride;  // rows from one state to the next
  int count;

  __device__ RowStates(const MergeStatesParams& params, std::int64_t row) : params(params) {
    const std::int64_t token = row / params.num_heads;
    const bool pair = params.v[1] != nullptr;
    first = pair ? row : token * (params.num_states - 1) * params.num_heads + row;
    stride = params.num_heads;
    count = pair ? 2 : params.num_states;
  }

  __device__ bool in_second_tensor(int state) const { return state == 1 && params.v[1] != nullptr; }
  __device__ std::int64_t row_of(int state) const {
    return params.v[1] != nullptr ? first : first + state * stride;
  }
  __device__ float s(int state) const {
    return (in_second_tensor(state) ? params.s[1] : params.s[0])[row_of(state)];
  }
  __device__ const T* v(int state) const {
    const void* base = in_second_tensor(state) ? params.v[1] : params.v[0];
    return static_cast<const T*>(base) + row_of(state) * params.head_dim;
  }
};

// The merged s is base + log2(sum), and a state's share is 2^(s - base) / sum.
struct StateSum {
  float base;  // the largest s; 0 where all are -inf, so that no difference is NaN
  float sum;   // 0: no state holds anything
};

template <class T>
__device__ __forceinline__ StateSum sum_states(const RowStates<T>& states) {
  float largest = -INFINITY;
  for (int i = 0; i < states.count; ++i) largest = fmaxf(largest, states.s(i));
  StateSum total{largest == -INFINITY ? 0.0f : largest, 0.0f};
  for (int i = 0; i < states.count; ++i) total.sum += exp2f(states.s(i) - total.base);
  return total;
}

template <class T, int kWidth>
__device__ __forceinline__ Pack<T, kWidth> merge_elements(const RowStates<T>& states,
                                                          const StateSum& total, int column) {
  // -0 is the exact neutral element of addition: a state merged with empty ones comes out
  // unchanged, zeros with their sign.
  float accumulated[kWidth];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) accumulated[e] = total.sum == 0.0f ? 0.0f : -0.0f;

  for (int first_state = 0; first_state < states.count; first_state += kBatch) {
    float weight[kBatch];
    Pack<T, kWidth> value[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int state = first_state + i;
      weight[i] = state < states.count ? exp2f(states.s(state) - total.base) : 0.0f;
      // Values of weight 0 are not read: an empty state may contain anything, also NaN.
      if (weight[i] != 0.0f) {
        value[i] = *reinterpret_cast<const Pack<T, kWidth>*>(states.v(state) + column);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (weight[i] == 0.0f) continue;
#pragma unroll
      for (int e = 0; e < kWidth; ++e) {
        accumulated[e] = fmaf(weight[i], to_float(value[i].element[e]), accumulated[e]);
      }
    }
  }
  const float inverse = total.sum == 0.0f ? 0.0f : 1.0f / total.sum;
  Pack<T, kWidth> merged;
#pragma unroll
  for (int e = 0; e < kWidth; ++e) merged.element[e] = from_float<T>(accumulated[e] * inverse);
  return merged;
}

// A row's 1 << log2_lanes lanes take its packs of kWidth elements in turn.
// Two CTAs per SM are asked for because the compiler aims at three on its own, and spills for it.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 2)
    merge_states_kernel(const MergeStatesParams params, int log2_lanes) {
  const std::int64_t thread = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t row = thread >> log2_lanes;
  const int lane = static_cast<int>(thread) & ((1 << log2_lanes) - 1);
  const bool active =
      row < params.num_tokens * params.num_heads &&
      (params.token_mask == nullptr || params.token_mask[row / params.num_heads] != 0);

  StateSum total{0.0f, 0.0f};
  if (active) {
    const RowStates<T> states(params, row);
    total = sum_states(states);
    T* v_out = static_cast<T*>(params.v_out) + row * params.head_dim;
    for (int column = lane * kWidth; column < params.head_dim; column += kWidth << log2_lanes) {
      *reinterpret_cast<Pack<T, kWidth>*>(v_out + column) =
          merge_elements<T, kWidth>(states, total, column);
    }
  }
  __syncwarp();  // s_out may be s[0]
  if (active && lane == 0) {
    params.s_out[row] = total.sum == 0.0f ? -INFINITY : total.base + log2f(total.sum);
  }
}

template <class T, int kWidth>
cudaError_t launch_with_width(const MergeStatesParams& params, cudaStream_t stream) {
  int log2_lanes = 0;
  while ((1 << log2_lanes) < kWarpSize && (kWidth << log2_lanes) < params.head_dim) ++log2_lanes;
  const std::int64_t num_threads = (params.num_tokens * params.num_heads) << log2_lanes;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(ceil_div<std::int64_t>(num_threads, kThreads)));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, merge_states_kernel<T, kWidth>, params, log2_lanes);
}

bool is_aligned(const void* address, std::size_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

}  // namespace

cudaError_t launch_merge_states(const MergeStatesParams& params, cudaStream_t stream) {
  return dispatch_element(params.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr std::size_t kPackBytes = 16;
    const bool packed =
        is_aligned(params.v[0], kPackBytes) && is_aligned(params.v[1], kPackBytes) &&
        is_aligned(params.v_out, kPackBytes) && params.head_dim * sizeof(T) % kPackBytes == 0;
    return packed ? launch_with_width<T, kPackBytes / sizeof(T)>(params, stream)
                  : launch_with_width<T, 1>(params, stream);
  });
}

}  // namespace preflash
