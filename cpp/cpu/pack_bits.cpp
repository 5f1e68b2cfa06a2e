#include "cpu/pack_bits.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "cpu/thread_pool.h"

namespace preflash::cpu {
namespace {

// Packed; below, a thread is not worth waking.
constexpr std::int64_t kPackTaskBytes = std::int64_t{1} << 14;

// Eight bytes to eight bits, byte i to bit i (little) or bit 7 - i (big).
std::uint8_t pack_eight(const std::uint8_t* x, bool little) {
  std::uint64_t bytes = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&bytes, x, sizeof bytes);
  } else {
    for (int i = 0; i < 8; ++i) bytes |= std::uint64_t{x[i]} << (8 * i);
  }
  // The top bit of each byte: whether it is non-zero. No carry leaves a byte.
  constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7f;
  const std::uint64_t ones = ((((bytes & kLow) + kLow) | bytes) & ~kLow) >> 7;
  // The product moves the 0/1 of byte i to bit 56 + i (or 63 - i); every other term falls below 56
  // without meeting another one, or over the top.
  const std::uint64_t gather = little ? 0x0102040810204080 : 0x8040201008040201;
  return static_cast<std::uint8_t>(ones * gather >> 56);
}

// Packed bytes [begin, end) of one segment of num_bits bytes.
void pack_segment(const std::uint8_t* x, std::int64_t num_bits, std::uint8_t* packed,
                  std::int64_t begin, std::int64_t end, bool little) {
  const std::int64_t whole = std::min(end, num_bits / 8);
  std::int64_t byte = begin;
  for (; byte < whole; ++byte) packed[byte] = pack_eight(x + 8 * byte, little);
  if (byte < end) {
    std::uint8_t last[8] = {};
    std::memcpy(last, x + 8 * byte, static_cast<std::size_t>(num_bits - 8 * byte));
    packed[byte] = pack_eight(last, little);
  }
}

}  // namespace

void pack_bits(const PackBitsParams& params, int num_threads) {
  if (params.num_segments == 0) return;
  const std::int64_t* segments_end = params.out_begin + params.num_segments;
  const std::int64_t first = params.out_begin[0], total = *segments_end - first;
  const int tasks = static_cast<int>((total + kPackTaskBytes - 1) / kPackTaskBytes);
  parallel_for(tasks, num_threads, [&](int task) {
    const std::int64_t begin = first + task * kPackTaskBytes;
    const std::int64_t end = std::min(begin + kPackTaskBytes, *segments_end);
    // The last segment that starts at or before `begin`, and those after it up to `end`.
    auto segment = std::upper_bound(params.out_begin, segments_end, begin) - params.out_begin - 1;
    for (; segment < params.num_segments && params.out_begin[segment] < end; ++segment) {
      const std::int64_t out = params.out_begin[segment], in = params.in_begin[segment];
      const std::int64_t num_bits = params.in_begin[segment + 1] - in;
      const std::int64_t from = std::max(begin - out, std::int64_t{0});
      const std::int64_t to = std::min(end - out, (num_bits + 7) / 8);
      pack_segment(params.x + in, num_bits, params.packed + out, from, to, params.little);
    }
  });
}

}  // namespace preflash::cpu
