#include "cpu/prepass.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "cpu/isa.h"
#include "cpu/rotary.h"
#include "cpu/thread_pool.h"
#include "preflash/prepass_row.h"

namespace preflash::cpu {
namespace {

constexpr int kMaxHeadDim = 512;

struct RowCopies {
  const PrepassParams& params;
  std::optional<RotaryTable> rotary = {};

  // All heads of one row.
  void row(const PrepassOperand& operand, const PrepassRow& row) const {
    alignas(kCacheLine) float wide[kMaxHeadDim];
    alignas(kCacheLine) float angles[kMaxHeadDim];
    Angles angle;
    if (operand.position == Position::kRope) angle = rotary->origin(row.position, angles);
    for (std::int32_t head = 0; head < operand.num_heads; ++head) {
      const std::int64_t from = row.from + head * operand.from.stride_head;
      const std::int64_t to = row.to + head * operand.to.stride_head;
      isa_kernels().widen(
          operand.from_dtype,
          static_cast<const std::byte*>(operand.from.data) + from * size_of(operand.from_dtype),
          wide, operand.head_dim);
      if (operand.position == Position::kRope) {
        isa_kernels().rotate(wide, operand.head_dim / 2, angle, rotary->offset(0));
      }
      isa_kernels().narrow(params.to_dtype, wide, 1.0f,
                           static_cast<std::byte*>(operand.to.data) + to * size_of(params.to_dtype),
                           operand.head_dim);
    }
  }

  template <class Find>
  void rows(const PrepassOperand& operand, std::int64_t count, int num_threads,
            const Find& find) const {
    if (operand.to.data == nullptr) return;
    const std::int64_t elements = std::int64_t{operand.num_heads} * operand.head_dim;
    const std::int64_t task_rows = std::max<std::int64_t>(kTaskElements / elements, 1);
    parallel_for(static_cast<int>(ceil_div(count, task_rows)), num_threads, [&](int task) {
      const std::int64_t end = std::min(count, (task + std::int64_t{1}) * task_rows);
      for (std::int64_t i = task * task_rows; i < end; ++i) {
        row(operand, find(params, operand, static_cast<std::int32_t>(i)));
      }
    });
  }
};

}  // namespace

void prepass(const PrepassParams& params, int num_threads) {
  RowCopies copies{.params = params};
  if (params.k.position == Position::kRope) {
    copies.rotary.emplace(params.rope, params.k.head_dim, 1);
  }
  copies.rows(params.k, params.num_keys, num_threads, prepass_key);
  copies.rows(params.v, params.num_keys, num_threads, prepass_key);
  copies.rows(params.q, params.num_queries, num_threads, prepass_query);
}

}  // namespace preflash::cpu
