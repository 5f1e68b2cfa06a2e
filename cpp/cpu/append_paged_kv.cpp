#include "cpu/append_paged_kv.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/thread_pool.h"
#include "preflash/page_slot.h"

namespace preflash::cpu {
namespace {

constexpr std::int64_t kTaskBytes = std::int64_t{1} << 16;  // below, a thread is not worth waking

void append_token(const AppendedRows& rows, std::int64_t token, const PageSlot& slot) {
  const std::uint8_t* from = rows.rows + token * rows.rows_token;
  std::uint8_t* to = rows.pool + slot.offset_in(rows);
  for (std::int32_t head = 0; head < rows.num_heads; ++head) {
    std::memcpy(to + head * rows.pool_head, from + head * rows.rows_head,
                static_cast<std::size_t>(rows.row_bytes));
  }
}

}  // namespace

void append_paged_kv(const AppendParams& params, int num_threads) {
  const std::int64_t token_bytes = std::int64_t{params.k.num_heads} * params.k.row_bytes +
                                   std::int64_t{params.v.num_heads} * params.v.row_bytes;
  const std::int64_t task_tokens =
      std::max(kTaskBytes / std::max(token_bytes, std::int64_t{1}), std::int64_t{1});
  const auto tasks = static_cast<int>((params.num_tokens + task_tokens - 1) / task_tokens);
  parallel_for(tasks, num_threads, [&](int task) {
    const std::int64_t begin = task * task_tokens;
    const std::int64_t end = std::min(begin + task_tokens, params.num_tokens);
    for (std::int64_t token = begin; token < end; ++token) {
      const PageSlot slot = page_slot(params, token);
      if (slot.page < 0) continue;
      append_token(params.k, token, slot);
      append_token(params.v, token, slot);
    }
  });
}

}  // namespace preflash::cpu
