#include "core/memory_span.h"

#include <algorithm>

namespace preflash {
namespace {

// Length of the run of bytes, from the tensor's address on, that covers what the tensor touches in
// each period of `period` bytes; 0 if no such run does.
std::int64_t bytes_in_period(const MemorySpan& span, std::int64_t period) {
  std::int64_t bytes = span.row_bytes;
  for (const MemorySpan::Dimension& dimension : span.dimensions) {
    if (dimension.count == 1 || dimension.stride % period == 0) continue;
    if (dimension.stride > period) return 0;
    bytes += (dimension.count - 1) * dimension.stride;
  }
  return bytes <= period ? bytes : 0;
}

// True if a and b touch disjoint parts of every period.
bool apart_in_period(std::int64_t distance, const MemorySpan& a, const MemorySpan& b,
                     std::int64_t period) {
  const std::int64_t a_bytes = bytes_in_period(a, period);
  const std::int64_t b_bytes = bytes_in_period(b, period);
  if (a_bytes == 0 || b_bytes == 0) return false;
  const std::int64_t b_begin = (distance % period + period) % period;  // a begins at 0
  return a_bytes <= b_begin && b_begin + b_bytes <= period;
}

}  // namespace

bool MemorySpan::empty() const {
  return row_bytes == 0 || std::any_of(dimensions.begin(), dimensions.end(),
                                       [](const Dimension& d) { return d.count == 0; });
}

std::int64_t MemorySpan::extent() const {
  if (empty()) return 0;
  std::int64_t bytes = row_bytes;
  for (const Dimension& dimension : dimensions) bytes += (dimension.count - 1) * dimension.stride;
  return bytes;
}

bool may_overlap(const void* a, const MemorySpan& a_span, const void* b, const MemorySpan& b_span) {
  const auto a_begin = reinterpret_cast<std::uintptr_t>(a);
  const auto b_begin = reinterpret_cast<std::uintptr_t>(b);
  if (a_begin >= b_begin + b_span.extent() || b_begin >= a_begin + a_span.extent()) return false;
  if (a_span.empty() || b_span.empty()) return false;
  const auto distance = static_cast<std::int64_t>(b_begin - a_begin);
  for (const MemorySpan* span : {&a_span, &b_span}) {
    for (const MemorySpan::Dimension& dimension : span->dimensions) {
      if (dimension.count > 1 && dimension.stride > 0 &&
          apart_in_period(distance, a_span, b_span, dimension.stride)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace preflash
