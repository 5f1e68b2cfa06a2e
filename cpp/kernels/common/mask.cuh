// Custom masks: bits of a row-major [qo_len, kv_len] matrix, little bit order, row after row
// without padding, so a row may begin at any bit.
#pragma once

#include <cstdint>

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

}  // namespace preflash
