// Scores know their coordinates: which token and head a packed row is, which key a column. Masks,
// here, and biases (score_bias.h) are policies on them: what depends on the place of a score does
// not belong into the loops.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/isa.h"
#include "cpu/scratch.h"
#include "preflash/mask_range.h"
#include "preflash/params.h"
#include "preflash/plan.h"

namespace preflash::cpu {

// The packed rows of one work item.
struct RowCoordinates {
  int row_begin = 0;
  int first_head = 0;  // first query head of the group
  int group_size = 1;

  int token(int row) const { return (row_begin + row) / group_size; }
  int head(int row) const { return first_head + (row_begin + row) % group_size; }
  RowSpan tokens(int row, int count) const { return {token(row), token(row + count - 1)}; }
  RowSpan tokens(const Panel& panel) const { return tokens(panel.row, panel.live); }
};

// Keys of one tile that an item or a panel attends to; local to the request, as everywhere.
struct TileKeys {
  KeySpan span;
  int tile_begin = 0;

  int begin() const { return span.begin - tile_begin; }
  int end() const { return span.end - tile_begin; }
  bool empty() const { return span.begin >= span.end; }
  TileKeys within(KeySpan other) const {
    return {.span = {std::max(span.begin, other.begin), std::min(span.end, other.end)},
            .tile_begin = tile_begin};
  }
};

// Bits [begin, end) of a word, both clamped to [0, 32].
inline std::uint32_t bit_range(int begin, int end) {
  begin = std::clamp(begin, 0, 32);
  end = std::clamp(end, 0, 32);
  if (begin >= end) return 0;
  return static_cast<std::uint32_t>((std::uint64_t{1} << end) - (std::uint64_t{1} << begin));
}

// Keys that a token keeps: those within the bounds whose bit in a custom mask, if any, is set.
class KeepPolicy {
 public:
  KeepPolicy(const ForwardSegment& params, const RequestInfo& request)
      : bounds_(bounds_of(params, request)),
        bits_(params.mask == Mask::kCustom ? params.extras.mask_bits + request.mask_begin
                                           : nullptr) {}

  const MaskBounds& bounds() const { return bounds_; }

  bool keeps_all(RowSpan rows, KeySpan keys) const {
    return bits_ == nullptr && bounds_.first_key(rows.last) <= keys.begin &&
           keys.end <= bounds_.end_key(rows.first);
  }

  // The keep bits of one token for the 32 keys from `begin`.
  std::uint32_t word(int token, int begin) const {
    const std::uint32_t word =
        bit_range(bounds_.first_key(token) - begin, bounds_.end_key(token) - begin);
    if (bits_ == nullptr || word == 0) return word;
    const int count = std::min(kMaskWordKeys, bounds_.kv_len - begin);
    return word & bits_from(std::int64_t{token} * bounds_.kv_len + begin, count);
  }

 private:
  // Up to 32 bits of the packed mask from bit `begin`, reading only the bytes that hold them.
  std::uint32_t bits_from(std::int64_t begin, int count) const {
    const int shift = static_cast<int>(begin & 7);
    const int num_bytes = ceil_div(shift + count, 8);
    std::uint64_t bits = 0;
    for (int i = 0; i < num_bytes; ++i) {
      bits |= static_cast<std::uint64_t>(bits_[(begin >> 3) + i]) << (8 * i);
    }
    return static_cast<std::uint32_t>(bits >> shift);
  }

  const MaskBounds bounds_;
  const std::uint8_t* bits_;  // the request's mask; null: no custom mask
};

enum class Kept { kNone, kSome, kAll };

// Fills keep [mask_words][panel.ld] for a panel and the keys of one tile, and returns how many of
// them are kept. With kAll, `keep` may be left unfilled.
inline Kept fill_keep(const KeepPolicy& policy, const RowCoordinates& rows, const Panel& panel,
                      const TileKeys& keys, std::uint32_t* keep) {
  if (policy.keeps_all(rows.tokens(panel), keys.span)) return Kept::kAll;
  std::uint32_t any = 0, missing = 0;
  const int end_word = ceil_div(keys.end(), kMaskWordKeys);
  for (int index = keys.begin() / kMaskWordKeys; index < end_word; ++index) {
    const int begin = keys.tile_begin + index * kMaskWordKeys;
    const std::uint32_t wanted = bit_range(keys.span.begin - begin, keys.span.end - begin);
    std::uint32_t* words = keep + index * panel.ld;
    int previous_token = -1;
    for (int i = 0; i < panel.live; ++i) {
      const int token = rows.token(panel.row + i);
      words[i] = token == previous_token ? words[i - 1] : policy.word(token, begin) & wanted;
      previous_token = token;
      any |= words[i];
      missing |= wanted & ~words[i];
    }
    std::fill(words + panel.live, words + panel.ld, 0u);
  }
  return any == 0 ? Kept::kNone : missing == 0 ? Kept::kAll : Kept::kSome;
}

}  // namespace preflash::cpu
