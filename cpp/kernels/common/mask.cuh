// Custom masks: bits of a row-major [qo_len, kv_len] matrix, little bit order, row after row
// without padding, so a row may begin at any bit.
#pragma once

#include <cstdint>

namespace preflash {

// 32 bits that begin anywhere, as they lie in memory. What loads them need not wait for them.
struct MaskWords {
  std::uint32_t low;
  std::uint32_t high;
  unsigned shift;  // modulo 32

  __device__ __forceinline__ std::uint32_t bits() const {
    return __funnelshift_r(low, high, shift);
  }
};

// Bits [bit, bit + 32) of a byte-addressed bit string. Reads at most 8 bytes from the word that
// holds the first; mask buffers are padded by that much.
__device__ __forceinline__ MaskWords load_mask_words(const std::uint8_t* bits, std::int64_t bit) {
  auto address = reinterpret_cast<std::uintptr_t>(bits) + (bit >> 3);
  auto* word = reinterpret_cast<const std::uint32_t*>(address & ~std::uintptr_t{3});
  unsigned shift = static_cast<unsigned>(address & 3) * 8 + static_cast<unsigned>(bit & 7);
  return {__ldg(word), __ldg(word + 1), shift};
}
__device__ __forceinline__ std::uint32_t load_mask_word(const std::uint8_t* bits,
                                                        std::int64_t bit) {
  return load_mask_words(bits, bit).bits();
}

}  // namespace preflash
