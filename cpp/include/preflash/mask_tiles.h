// Block-sparse form of a custom mask, which a kernel reads in addition to the bits: each tile is
// empty, full or partial. That is a property of the bits alone; the kernel applies its bounds
// itself.
//
// A request has a row of KV tiles, two bits each, for each of its tiles of packed rows, the same
// for every KV head, and a row has whole words. The rows of a request follow each other, request
// after request.
#pragma once

#include <cstdint>

#include "preflash/plan.h"

namespace preflash {

struct MaskTiles {
  static constexpr int kBits = 2;  // bits per tile
  static constexpr int kWordTiles = 32 / kBits;
  // The lower bits of all tiles: a token keeps a key. The upper bit: all tokens keep all keys.
  static constexpr std::uint32_t kSome = 0x55555555;

  // Packs one word. The lower bits of `some` mark tiles in which a token keeps a key, those of
  // `missing` tiles in which a token does not keep one.
  PREFLASH_HD static constexpr std::uint32_t word_of(std::uint32_t some, std::uint32_t missing) {
    return some | (some & ~missing) << 1;
  }
  // The bits of a word's tiles before `tile`.
  PREFLASH_HD static constexpr std::uint32_t before(int tile) {
    if (tile <= 0) return 0;
    return tile >= kWordTiles ? ~std::uint32_t{0} : (std::uint32_t{1} << tile * kBits) - 1;
  }
};

// Shape of the mask tiles of one segment's requests.
struct MaskTilesShape {
  std::int32_t rows_per_tile = 0;
  std::int32_t tile_keys = 0;
  std::int32_t group_size = 1;

  PREFLASH_HD constexpr std::int64_t row_words(const RequestInfo& request) const {
    return ceil_div(ceil_div(request.kv_len, tile_keys), MaskTiles::kWordTiles);
  }
  PREFLASH_HD constexpr std::int64_t num_rows(const RequestInfo& request) const {
    return ceil_div(request.qo_len * group_size, rows_per_tile);
  }
  PREFLASH_HD constexpr std::int64_t words(const RequestInfo& request) const {
    return num_rows(request) * row_words(request);
  }
  // The tokens of a row.
  PREFLASH_HD constexpr RowSpan tokens(const RequestInfo& request, std::int64_t row) const {
    const auto first = static_cast<std::int32_t>(row * rows_per_tile);
    const std::int32_t last = first + rows_per_tile - 1;
    const std::int32_t last_token = request.qo_len - 1;
    const std::int32_t token = last / group_size;
    return {first / group_size, token < last_token ? token : last_token};
  }

  // The most words of any batch of so many requests, with at most so many tokens, whose mask has
  // at most so many bytes: ceil(a) ceil(b) <= (a + 1) (b + 1), where a request of L tokens and S
  // keys has a = L group / rows, b = S / keys of a word, and L S >= S bits in the mask.
  constexpr std::int64_t most_words(std::int64_t requests, std::int64_t tokens,
                                    std::int64_t mask_bytes) const {
    const std::int64_t rows_of_tile = rows_per_tile;
    const std::int64_t keys_of_word = std::int64_t{tile_keys} * MaskTiles::kWordTiles;
    const std::int64_t keys = ceil_div(mask_bytes * 8, keys_of_word);
    return ceil_div(keys * group_size, rows_of_tile) + ceil_div(tokens * group_size, rows_of_tile) +
           keys + requests;
  }
};

// Finds the tiles of the mask of one segment, in a launch.
struct MaskTilesParams {
  MaskTilesShape shape;
  const RequestInfo* requests = nullptr;           // [num_requests]
  const std::int64_t* mask_tiles_begin = nullptr;  // [num_requests + 1]: each one's first word
  const std::uint8_t* mask_bits = nullptr;         // RunExtras::mask_bits
  std::uint32_t* words = nullptr;                  // [mask_tiles_begin[num_requests]]
  std::int32_t num_requests = 0;
};

}  // namespace preflash
