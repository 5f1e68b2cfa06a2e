// Time and place of each work item of a launch, for `python -m preflash bench --trace`. The CPU
// backend records on request; CUDA kernels record only in a build with PREFLASH_TRACE, and
// otherwise do not even take the address.
#pragma once

#include <cstdint>

namespace preflash {

// Ability of a kernel to record its items.
enum class Tracing : std::uint8_t { kNone, kItems };

// One work item, at its place in the work list; all 0: it did not run. python/preflash/cli/bench/
// trace.py reads these bytes. All items are of one launch, so all times are of one clock.
struct alignas(16) ItemRecord {
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  std::int32_t processor = 0;  // the SM; on the CPU the thread
  std::int32_t cta = 0;
  std::int32_t request = 0;
  std::int16_t kv_head = 0;
  std::int16_t chunk = 0;
};
static_assert(sizeof(ItemRecord) == 32);

}  // namespace preflash
