#include "cpu/merge.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "cpu/isa.h"
#include "cpu/partial_lse.h"
#include "cpu/thread_pool.h"

namespace preflash::cpu {
namespace {

constexpr int kColumns = 256;  // of a row at a time: what a merge holds on the stack

// One row of `width` columns from num_states rows. A state of weight 0 is not read.
template <class LseOfState, class RowOf>
void merge_row(const MergedLse& merged, int num_states, const LseOfState& lse_of_state,
               const RowOf& row_of, DType dtype, float* sum, int width) {
  alignas(kCacheLine) float row[kColumns];
  std::fill_n(sum, width, 0.0f);
  bool first = true;
  for (int i = 0; i < num_states; ++i) {
    const float weight = merged.weight(lse_of_state(i));
    if (weight == 0.0f) continue;
    if (first) std::fill_n(sum, width, kNothing);
    first = false;
    isa_kernels().widen(dtype, row_of(i), row, width);
    isa_kernels().accumulate(weight, row, sum, width);
  }
}

void combine_tile(const CombineParams& params, const MergeItem& item) {
  const RequestInfo& request = params.requests[item.request];
  const QueryRows rows = params.grid.rows(request, item.row_begin);
  const int stride = params.grid.partial_rows(request, rows), group_size = params.grid.group_size;
  for (int row = 0; row < rows.count; ++row) {
    const int packed = rows.begin + row;
    const std::int64_t qo_row = std::int64_t{request.qo_begin} + packed / group_size;
    const std::int64_t head = std::int64_t{item.kv_head} * group_size + packed % group_size;
    auto partial_row = [&](int chunk) {
      return std::int64_t{item.first_row} + std::int64_t{chunk} * stride + row;
    };
    // Behind the chunks' states may come one that weighs but has no row.
    const std::optional<PartialLse> keyless = keyless_lse(params.extras, head);
    auto lse_of_state = [&](int state) {
      return state < item.num_chunks ? params.partial_lse[partial_row(state)] : *keyless;
    };
    const int num_states = item.num_chunks + (keyless ? 1 : 0);
    const MergedLse merged(num_states, lse_of_state);

    auto* o =
        static_cast<std::byte*>(params.o.data) +
        (qo_row * params.o.stride_token + head * params.o.stride_head) * size_of(params.o_dtype);
    for (int column = 0; column < params.head_dim_vo; column += kColumns) {
      alignas(kCacheLine) float sum[kColumns];
      const int width = std::min(kColumns, params.head_dim_vo - column);
      auto row_of = [&](int chunk) {
        return params.partial_o + partial_row(chunk) * params.head_dim_vo + column;
      };
      merge_row(merged, item.num_chunks, lse_of_state, row_of, DType::kFloat32, sum, width);
      isa_kernels().narrow(params.o_dtype, sum, merged.empty() ? 0.0f : 1.0f / merged.sum,
                           o + column * size_of(params.o_dtype), width);
    }
    if (params.lse.data != nullptr) {
      params.lse.data[qo_row * params.lse.stride_token + head * params.lse.stride_head] =
          merged.lse() * params.lse.scale;
    }
  }
}

// Row `row` of [tokens * heads]. The outputs may lie on the inputs (merge_state_in_place): every
// state is read before the row is written.
void merge_states_row(const MergeStatesParams& params, std::int64_t row) {
  const std::int64_t token = row / params.num_heads;
  const bool separate = params.v[1] != nullptr;
  const int size = size_of(params.dtype);
  auto state_row = [&](int state) {
    return separate
               ? row
               : (token * params.num_states + state) * params.num_heads + row % params.num_heads;
  };
  auto lse_of_state = [&](int state) {
    return PartialLse{.high = params.s[separate ? state : 0][state_row(state)], .low = 0.0f};
  };
  const int num_states = separate ? 2 : params.num_states;
  const MergedLse merged(num_states, lse_of_state);
  for (int column = 0; column < params.head_dim; column += kColumns) {
    alignas(kCacheLine) float sum[kColumns];
    const int width = std::min(kColumns, params.head_dim - column);
    auto row_of = [&](int state) {
      return static_cast<const std::byte*>(params.v[separate ? state : 0]) +
             (state_row(state) * params.head_dim + column) * size;
    };
    merge_row(merged, num_states, lse_of_state, row_of, params.dtype, sum, width);
    isa_kernels().narrow(
        params.dtype, sum, merged.empty() ? 0.0f : 1.0f / merged.sum,
        static_cast<std::byte*>(params.v_out) + (row * params.head_dim + column) * size, width);
  }
  params.s_out[row] = merged.lse();
}

}  // namespace

void combine(const CombineParams& params, int num_threads) {
  parallel_for(params.num_merges, num_threads,
               [&](int index) { combine_tile(params, params.merges[index]); });
}

void merge_states(const MergeStatesParams& params, int num_threads) {
  const std::int64_t rows = params.num_tokens * params.num_heads;
  const std::int64_t row_elements =
      std::max<std::int64_t>(std::int64_t{params.num_states} * params.head_dim, 1);
  const std::int64_t task_rows = std::max<std::int64_t>(kTaskElements / row_elements, 1);
  parallel_for(static_cast<int>(ceil_div(rows, task_rows)), num_threads, [&](int task) {
    const std::int64_t end = std::min(rows, (task + std::int64_t{1}) * task_rows);
    for (std::int64_t row = task * task_rows; row < end; ++row) {
      const bool wanted =
          params.token_mask == nullptr || params.token_mask[row / params.num_heads] != 0;
      if (wanted) merge_states_row(params, row);
    }
  });
}

}  // namespace preflash::cpu
