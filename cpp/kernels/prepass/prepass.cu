// The pre-pass over the rows of K, V and Q that a plan copies: gathered through the page table,
// dequantised to the kernel's 16 bits, rotated. Memory is the limit: a thread has one position and
// 8 dimensions of two heads, whose angles it makes once. (More heads to a thread, with more or
// fewer loads in flight, gain nothing.) The CTAs of all operands are one launch, one operand's
// behind the other's.
#include <cstdint>

#include "kernels/common/dequantize.cuh"
#include "kernels/common/rotary.cuh"
#include "kernels/prepass/prepass.h"
#include "preflash/prepass_row.h"

namespace preflash {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 4;
constexpr int kUnit = 8;           // elements of a thread in one head
constexpr int kHeads = 2;          // heads of a thread in one task, in flight together
constexpr int kTasksOfCta = 1024;  // about as many
constexpr int kPairs = kUnit / 2;  // rotated pairs of a thread

// Partition of one operand over its CTAs. A task is a row's unit in kHeads heads.
struct Share {
  int units = 0;      // of a row
  int row_tasks = 0;  // units * groups of heads
  int cta_rows = 1;
  int ctas = 0;

  static Share of(const PrepassOperand& operand, std::int64_t rows) {
    if (operand.to.data == nullptr) return {};
    Share share;
    share.units = operand.head_dim / kUnit;
    share.row_tasks = share.units * ceil_div(operand.num_heads, kHeads);
    share.cta_rows = kTasksOfCta / share.row_tasks > 1 ? kTasksOfCta / share.row_tasks : 1;
    share.ctas = static_cast<int>(ceil_div(rows, std::int64_t{share.cta_rows}));
    return share;
  }
};

struct PrepassLaunch {
  PrepassParams params;
  Share of_k, of_v, of_q;
  RotaryFrequencies frequencies;  // all 0 without RoPE
};

// Neighbouring elements as they are stored.
template <DType kDType, int kCount>
struct alignas(size_of(kDType) * kCount) Stored {
  std::uint32_t word[size_of(kDType) * kCount / 4];
};

template <DType kFrom, DType kTo>
__device__ __forceinline__ Stored<kTo, 8> dequantized(const Stored<kFrom, 8>& eight) {
  if constexpr (kFrom == kTo) {
    return eight;
  } else {
    const FourElements low = dequantize<kFrom, kTo>(eight.word[0]);
    const FourElements high = dequantize<kFrom, kTo>(eight.word[1]);
    return {{low.pair[0], low.pair[1], high.pair[0], high.pair[1]}};
  }
}

template <DType kFrom>
__device__ __forceinline__ void to_floats(const Stored<kFrom, kPairs>& four, float (&x)[kPairs]) {
  constexpr DType kWide = size_of(kFrom) == 1 ? DType::kFloat16 : kFrom;
  float2 low, high;
  if constexpr (size_of(kFrom) == 1) {
    const FourElements wide = dequantize<kFrom, kWide>(four.word[0]);
    low = Pair<kWide>::to_floats(wide.pair[0]);
    high = Pair<kWide>::to_floats(wide.pair[1]);
  } else {
    low = Pair<kWide>::to_floats(four.word[0]);
    high = Pair<kWide>::to_floats(four.word[1]);
  }
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

template <DType kTo>
__device__ __forceinline__ Stored<kTo, kPairs> from_floats(const float (&x)[kPairs]) {
  return {{Pair<kTo>::from_floats({x[0], x[1]}), Pair<kTo>::from_floats({x[2], x[3]})}};
}

// One task: some heads of a row.
struct Task {
  PrepassRow row;
  int unit;
  int first_head;
  int num_heads;  // at most kHeads
};

// Copies of 16 bytes.
template <DType kFrom, DType kTo>
__device__ __forceinline__ void copy(const PrepassOperand& operand, const Task& task) {
  const auto* from = static_cast<const unsigned char*>(operand.from.data) +
                     (task.row.from + task.unit * kUnit) * size_of(kFrom);
  auto* to = static_cast<unsigned char*>(operand.to.data) +
             (task.row.to + task.unit * kUnit) * size_of(kTo);
  Stored<kFrom, kUnit> eight[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= task.num_heads) break;
    const std::int64_t head = (task.first_head + i) * operand.from.stride_head;
    eight[i] = *reinterpret_cast<const Stored<kFrom, kUnit>*>(from + head * size_of(kFrom));
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= task.num_heads) break;
    const std::int64_t head = (task.first_head + i) * operand.to.stride_head;
    *reinterpret_cast<Stored<kTo, kUnit>*>(to + head * size_of(kTo)) =
        dequantized<kFrom, kTo>(eight[i]);
  }
}

// Four pairs: dimensions low ... low + 3 turn with those half a head_dim further on.
template <DType kFrom, DType kTo>
__device__ __forceinline__ void rotate_heads(const PrepassOperand& operand, const Task& task,
                                             const std::uint64_t* frequency) {
  using From = Stored<kFrom, kPairs>;
  using To = Stored<kTo, kPairs>;
  const int half = operand.head_dim / 2;
  const auto* from = static_cast<const unsigned char*>(operand.from.data) +
                     (task.row.from + task.unit * kPairs) * size_of(kFrom);
  auto* to = static_cast<unsigned char*>(operand.to.data) +
             (task.row.to + task.unit * kPairs) * size_of(kTo);
  From low[kHeads], high[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= task.num_heads) break;
    const std::int64_t head = (task.first_head + i) * operand.from.stride_head;
    low[i] = *reinterpret_cast<const From*>(from + head * size_of(kFrom));
    high[i] = *reinterpret_cast<const From*>(from + (head + half) * size_of(kFrom));
  }
  Rotation by[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    by[i] = rotation_by(turns_at(task.row.position, frequency[task.unit * kPairs + i]));
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    if (i >= task.num_heads) break;
    float a[kPairs], b[kPairs];
    to_floats<kFrom>(low[i], a);
    to_floats<kFrom>(high[i], b);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) rotate(a[pair], b[pair], by[pair]);
    const std::int64_t head = (task.first_head + i) * operand.to.stride_head;
    *reinterpret_cast<To*>(to + head * size_of(kTo)) = from_floats<kTo>(a);
    *reinterpret_cast<To*>(to + (head + half) * size_of(kTo)) = from_floats<kTo>(b);
  }
}

template <DType kFrom, DType kTo>
__device__ __forceinline__ void run(const PrepassOperand& operand, const Task& task,
                                    const std::uint64_t* frequency) {
  if (operand.position == Position::kRope) {
    rotate_heads<kFrom, kTo>(operand, task, frequency);
  } else {
    copy<kFrom, kTo>(operand, task);
  }
}

enum class RowsOf { kKeys, kQueries };

template <DType kTo, RowsOf kRows>
__device__ __forceinline__ void prepass_rows(const PrepassParams& params,
                                             const PrepassOperand& operand, const Share& share,
                                             int cta, const std::uint64_t* frequency) {
  const std::int64_t num_rows = kRows == RowsOf::kKeys ? params.num_keys : params.num_queries;
  const std::int64_t first_row = std::int64_t{cta} * share.cta_rows;
  const int rows = static_cast<int>(min(num_rows - first_row, std::int64_t{share.cta_rows}));
  for (int i = threadIdx.x; i < rows * share.row_tasks; i += kThreads) {
    const int row = i / share.row_tasks;
    const int in_row = i - row * share.row_tasks;
    const int group = in_row / share.units;
    const auto index = static_cast<std::int32_t>(first_row + row);
    const Task task{.row = kRows == RowsOf::kKeys ? prepass_key(params, operand, index)
                                                  : prepass_query(params, operand, index),
                    .unit = in_row - group * share.units,
                    .first_head = group * kHeads,
                    .num_heads = min(operand.num_heads - group * kHeads, kHeads)};
    switch (operand.from_dtype) {
      case DType::kFloat8E4M3: run<DType::kFloat8E4M3, kTo>(operand, task, frequency); break;
      case DType::kFloat8E5M2: run<DType::kFloat8E5M2, kTo>(operand, task, frequency); break;
      default: run<kTo, kTo>(operand, task, frequency);
    }
  }
}

template <DType kTo>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    prepass_kernel(const __grid_constant__ PrepassLaunch launch) {
  // In shared memory, because a warp reads parameters one address at a time.
  __shared__ std::uint64_t frequency[kMaxRotaryPairs];
  const PrepassParams& params = launch.params;
  if (params.k.position == Position::kRope) {
    for (int i = threadIdx.x; i < params.k.head_dim / 2; i += kThreads) {
      frequency[i] = launch.frequencies.of_pair[i];
    }
    __syncthreads();
  }
  int cta = blockIdx.x;
  if (cta < launch.of_k.ctas) {
    prepass_rows<kTo, RowsOf::kKeys>(params, params.k, launch.of_k, cta, frequency);
    return;
  }
  cta -= launch.of_k.ctas;
  if (cta < launch.of_v.ctas) {
    prepass_rows<kTo, RowsOf::kKeys>(params, params.v, launch.of_v, cta, frequency);
    return;
  }
  cta -= launch.of_v.ctas;
  prepass_rows<kTo, RowsOf::kQueries>(params, params.q, launch.of_q, cta, frequency);
}

}  // namespace

cudaError_t launch_prepass(const PrepassParams& params, cudaStream_t stream) {
  PrepassLaunch launch{.params = params,
                       .of_k = Share::of(params.k, params.num_keys),
                       .of_v = Share::of(params.v, params.num_keys),
                       .of_q = Share::of(params.q, params.num_queries),
                       .frequencies = {}};
  if (params.k.position == Position::kRope) {
    launch.frequencies = rotary_frequencies(params.rope, params.k.head_dim);
  }
  const int ctas = launch.of_k.ctas + launch.of_v.ctas + launch.of_q.ctas;
  if (ctas == 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(ctas));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return params.to_dtype == DType::kFloat16
             ? cudaLaunchKernelEx(&config, prepass_kernel<DType::kFloat16>, launch)
             : cudaLaunchKernelEx(&config, prepass_kernel<DType::kBFloat16>, launch);
}

}  // namespace preflash
