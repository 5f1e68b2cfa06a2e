// The only tile arithmetic in the project: which KV tiles a block of query rows touches, which of
// them need element masking, and whether one element is masked. The planner counts with it, the
// kernels loop with it, the CPU backend runs it. Indices are local to one request.
#pragma once

#include "preflash/types.h"

namespace preflash {

// Row i stands at position i + delta, where delta = kv_len - qo_len aligns the last row with the
// last key. It keeps key j iff 0 <= j < kv_len, j <= position when causal, j >= position -
// window_left when window_left >= 0, and, with chunks, j is not before the chunk of the position:
// positions [c, c + 1) * chunk_size are one.
struct MaskBounds {
  int qo_len = 0;
  int kv_len = 0;
  int window_left = -1;  // inclusive; -1 is off
  bool causal = false;
  int chunk_size = 0;  // a power of two; 0 is off

  PREFLASH_HD constexpr int delta() const { return kv_len - qo_len; }

  // Keys of row i form one interval [first_key, last_key + 1); it is empty when the row sees no
  // key.
  PREFLASH_HD constexpr int first_key(int row) const {
    int position = row + delta();
    int first = window_left >= 0 ? position - window_left : 0;
    int chunk = position & -chunk_size;  // 0 without chunks
    if (chunk > first) first = chunk;
    return first > 0 ? first : 0;
  }
  PREFLASH_HD constexpr int end_key(int row) const {
    int end = causal && row + delta() + 1 < kv_len ? row + delta() + 1 : kv_len;
    return end > 0 ? end : 0;
  }
  PREFLASH_HD constexpr bool keeps(int row, int key) const {
    return key >= first_key(row) && key < end_key(row);
  }
};

// Tokens [first, last] of one request, both inclusive: the rows of one query tile.
struct RowSpan {
  int first = 0;
  int last = 0;
};

// Keys [begin, end) of one request: a KV chunk. begin is a multiple of the tile size.
struct KeySpan {
  int begin = 0;
  int end = 0;
};

// Tiles [begin, end) are touched; [full_begin, full_end) of them need no element mask. Tile t holds
// keys [t * tile_n, (t + 1) * tile_n). When nothing is touched all four are equal.
struct TileRange {
  int begin = 0;
  int full_begin = 0;
  int full_end = 0;
  int end = 0;

  PREFLASH_HD constexpr int count() const { return end - begin; }
  PREFLASH_HD constexpr bool needs_mask(int tile) const {
    return tile < full_begin || tile >= full_end;
  }
};

// The keys that any row of the span keeps. first_key and end_key both grow with the row.
PREFLASH_HD constexpr KeySpan touched_keys(const MaskBounds& bounds, RowSpan rows) {
  return {bounds.first_key(rows.first), bounds.end_key(rows.last)};
}

PREFLASH_HD constexpr TileRange touched_tiles(const MaskBounds& bounds, RowSpan rows, KeySpan chunk,
                                              int tile_n, Mask mask) {
  KeySpan touched = touched_keys(bounds, rows);
  int low = touched.begin > chunk.begin ? touched.begin : chunk.begin;
  int high = touched.end < chunk.end ? touched.end : chunk.end;
  if (low >= high) return {};

  TileRange range;
  range.begin = low / tile_n;
  range.end = ceil_div(high, tile_n);
  // Keys that every row keeps: from the last row's first key to the first row's end.
  int full_low = bounds.first_key(rows.last);
  int full_high = bounds.end_key(rows.first);
  int full_begin = ceil_div(full_low, tile_n);
  int full_end = full_high / tile_n;
  range.full_begin = full_begin < range.begin ? range.begin
                     : full_begin > range.end ? range.end
                                              : full_begin;
  range.full_end = full_end > range.end          ? range.end
                   : full_end < range.full_begin ? range.full_begin
                                                 : full_end;
  if (mask == Mask::kCustom) range.full_end = range.full_begin;
  return range;
}

}  // namespace preflash
