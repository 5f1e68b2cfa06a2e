// Custom masks: bits of a row-major [qo_len, kv_len] matrix, little bit order, row after row
// without padding, so a row may begin at any bit.
#pragma once

#include <cute/tensor.hpp>

#include "preflash/types.h"

namespace preflash {

// Bits [bit, bit + 32) of a byte-addressed bit string. Reads at most 8 bytes from the word that
// holds the first; mask buffers are padded by that much.
__device__ __forceinline__ std::uint32_t load_mask_word(const std::uint8_t* bits,
                                                        std::int64_t bit) {
  auto address = reinterpret_cast<std::uintptr_t>(bits) + (bit >> 3);
  auto* word = reinterpret_cast<const std::uint32_t*>(address & ~std::uintptr_t{3});
  unsigned shift = static_cast<unsigned>(address & 3) * 8 + static_cast<unsigned>(bit & 7);
  return __funnelshift_r(__ldg(word), __ldg(word + 1), shift);
}

// scores: one thread's columns of one row, at `places` (tile row, tile column); row_bit is the bit
// of the tile's first column and num_bits the row's bits from there on: 0 or less, none.
template <class Scores, class Places>
__device__ __forceinline__ void mask_custom_row(Scores&& scores, const Places& places,
                                                const std::uint8_t* bits, std::int64_t row_bit,
                                                int num_bits) {
  using namespace cute;
  constexpr int kColumnsPerWord = 32;
  // A thread's columns lie in groups of 8: four groups share one word.
  constexpr int kColumnsPerThread = decltype(size(scores))::value;
  constexpr int kPerWord = kColumnsPerWord / 8 * 2;
  static_assert(kColumnsPerThread <= kPerWord || kColumnsPerThread % kPerWord == 0);
  CUTE_UNROLL
  for (int first = 0; first < kColumnsPerThread; first += kPerWord) {
    constexpr int kShare = kPerWord < kColumnsPerThread ? kPerWord : kColumnsPerThread;
    int word_column = first / kPerWord * kColumnsPerWord;
    // NOTE: a word that begins past the row's end may begin past the buffer's.
    std::uint32_t word = word_column < num_bits ? load_mask_word(bits, row_bit + word_column) : 0u;
    CUTE_UNROLL
    for (int c = first; c < first + kShare; ++c) {
      int column = get<1>(places(c)) - word_column;
      if (!((word >> column) & 1u)) scores(c) = -INFINITY;
    }
  }
}

}  // namespace preflash
