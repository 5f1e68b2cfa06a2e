// The place of a warpgroup's scores, and the policies on it: masks here, others in scores.cuh.
#pragma once

#include "kernels/common/mask.cuh"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// Element (r, c) of a thread's scores, as (rows, columns), in one tile of a work item.
template <class Traits>
struct ScoreCoordinates : ItemView {
  static constexpr int kRows = 2;  // of one thread

  int warp_row;  // the first row of this warp, of the item's tile of rows
  int tile;      // own_tile(): in units of kTileN keys

  // In the tile with the request's last key the columns from `edge` on lie `shift` further right,
  // where TMA puts the rows of a partial box at its end (cuda/tma/tensor_map.h).
  struct Tail {
    int edge;
    int shift;

    CUTE_DEVICE bool holds(int column) const { return column >= edge; }
  };
  CUTE_DEVICE Tail tail() const {
    int box_rows = params.box.tail_rows;
    int last = request.kv_len - first_key();
    if (box_rows == 0 || last >= Traits::kTileN) return {Traits::kTileN, 0};
    int in_box = last % box_rows;
    return {last - in_box, in_box == 0 ? 0 : box_rows - in_box};
  }

  CUTE_DEVICE int row(int r) const { return warp_row + lane_id() / 4 + r * 8; }
  CUTE_DEVICE int token(int r) const { return packed(row(r)).token; }
  CUTE_DEVICE int head(int r) const { return query_head(packed(row(r))); }

  // Columns: a thread's first one, and how far from there the others lie.
  CUTE_DEVICE static int first_column() { return lane_id() % 4 * 2; }
  CUTE_DEVICE static constexpr int column_step(int c) { return c / 2 * 8 + c % 2; }
  CUTE_DEVICE static int column(int c) { return first_column() + column_step(c); }

  // Keys of the request. Columns [edge, edge + shift) hold zeros and belong to no key.
  CUTE_DEVICE int first_key() const { return tile * Traits::kTileN; }
};

// The columns of a tile that this thread's two rows keep. A word has the 32 columns that the thread
// holds of 128: bit i is column_step(i) after its first one.
template <class Traits>
struct TileMask {
  static constexpr int kWordColumns = 128;
  static constexpr int kWords = ceil_div(Traits::kTileN, kWordColumns);
  using Coordinates = ScoreCoordinates<Traits>;

  std::uint32_t bits[Coordinates::kRows][kWords];

  // Length, causal and window.
  CUTE_DEVICE static TileMask of_bounds(const Coordinates& coordinates) {
    MaskBounds bounds = coordinates.bounds();
    auto tail = coordinates.tail();
    int first_key = coordinates.first_key();
    TileMask mask;
    for_rows([&](int r) {
      int token = coordinates.token(r);
      KeySpan kept{bounds.first_key(token) - first_key, bounds.end_key(token) - first_key};
      CUTE_UNROLL
      for (int word = 0; word < kWords; ++word) {
        int column = word * kWordColumns + Coordinates::first_column();
        std::uint32_t& bits = mask.bits[r][word];
        bits = columns_in(kept.begin - column, min(kept.end, tail.edge) - column);
        if (tail.shift > 0) {
          bits |= columns_in(max(kept.begin, tail.edge) + tail.shift - column,
                             kept.end + tail.shift - column);
        }
      }
    });
    return mask;
  }

  // A custom mask's bits before the exchange: 32 columns of both rows in each lane of a quad. Both
  // shifts share a register, because all of it stays through a softmax.
  struct RawBits {
    std::uint32_t low[Coordinates::kRows];
    std::uint32_t high[Coordinates::kRows];
    unsigned shifts = 0;

    CUTE_DEVICE std::uint32_t columns(int r) const {
      return MaskWords{low[r], high[r], shifts >> r * 8}.bits();
    }
  };
  CUTE_DEVICE static RawBits read_bits(const Coordinates& coordinates) {
    RawBits raw;
    for_rows([&](int r) {
      MaskWords words = words_at(coordinates, r, coordinates.first_key() + lane_column());
      raw.low[r] = words.low;
      raw.high[r] = words.high;
      raw.shifts |= words.shift << r * 8;
    });
    return raw;
  }
  // For a tile that the bounds keep whole.
  CUTE_DEVICE static TileMask of_bits(const RawBits& raw) {
    static_assert(kWords == 1);
    TileMask mask;
    for_rows([&](int r) { mask.bits[r][0] = exchange_columns(group_columns(raw.columns(r))); });
    return mask;
  }
  // For any other tile: the bounds apply, and the request's tail may be in it.
  CUTE_DEVICE static TileMask of_bits_and_bounds(const Coordinates& coordinates, RawBits raw) {
    auto tail = coordinates.tail();
    if (tail.shift > 0) {
      for_rows([&](int r) {
        raw.low[r] = raw.high[r] = with_tail(coordinates, r, tail, raw.columns(r));
      });
      raw.shifts = 0;
    }
    TileMask mask = of_bits(raw);
    TileMask bounds = of_bounds(coordinates);
    for_rows([&](int r) { mask.bits[r][0] &= bounds.bits[r][0]; });
    return mask;
  }

  CUTE_DEVICE void apply(auto&& scores) const {
    for_each_element(scores, [&](int r, int c, float& x) {
      if (!(bits[r][c / 32] >> c % 32 & 1u)) x = -INFINITY;
    });
  }

 private:
  // The mask bits of the columns before `column`.
  CUTE_DEVICE static std::uint32_t columns_before(int column) {
    int count = min(max(column / 8 * 2 + min(column % 8, 2), 0), 32);
    return count == 0 ? 0u : 0xffffffffu >> (32 - count);
  }
  CUTE_DEVICE static std::uint32_t columns_in(int begin, int end) {
    return columns_before(max(end, 0)) & ~columns_before(max(begin, 0));
  }

  // The first of the 32 columns whose bits this lane reads.
  CUTE_DEVICE static int lane_column() { return lane_id() % 4 * 32; }
  // The bits of row r from `key` on, which is 0 or more.
  CUTE_DEVICE static MaskWords words_at(const Coordinates& coordinates, int r, int key) {
    const RequestInfo& request = coordinates.request;
    if (Traits::kOptionsAtRunTime && coordinates.params.mask != Mask::kCustom) {
      return {0xffffffffu, 0xffffffffu, 0};
    }
    const std::uint8_t* bits = coordinates.params.extras.mask_bits + request.mask_begin;
    // Rows past the item's end and keys past the request's end have no bits.
    std::int64_t token = min(coordinates.token(r), request.qo_len - 1);
    return load_mask_words(bits, token * request.kv_len + min(key, request.kv_len - 1));
  }
  // columns: right up to the tail's edge. Behind the edge keys stand further right.
  CUTE_DEVICE static std::uint32_t with_tail(const Coordinates& coordinates, int r,
                                             const auto& tail, std::uint32_t columns) {
    int column = lane_column();
    if (column + 32 <= tail.edge) return columns;
    std::uint32_t before = tail.edge > column ? (1u << (tail.edge - column)) - 1 : 0u;
    int key = coordinates.first_key() + column - tail.shift;
    if (key <= -32) return columns & before;
    std::uint32_t behind = words_at(coordinates, r, max(key, 0)).bits() << max(-key, 0);
    return columns & before | behind & ~before;
  }
  // Bits 8 i + 2 q + {0, 1}, which belong to lane q of the quad, become bits 8 q + 2 i + {0, 1}, by
  // two swaps of a bit of i with one of q.
  CUTE_DEVICE static std::uint32_t group_columns(std::uint32_t bits) {
    std::uint32_t differ = (bits >> 6 ^ bits) & 0x00cc00ccu;
    bits ^= differ ^ differ << 6;
    differ = (bits >> 12 ^ bits) & 0x0000f0f0u;
    return bits ^ differ ^ differ << 12;
  }
  // Byte q of lane i becomes byte i of lane q.
  CUTE_DEVICE static std::uint32_t exchange_columns(std::uint32_t bytes) {
    std::uint32_t other = __shfl_xor_sync(0xffffffffu, bytes, 1);
    bytes = __byte_perm(bytes, other, lane_id() % 2 == 0 ? 0x6240 : 0x3715);
    other = __shfl_xor_sync(0xffffffffu, bytes, 2);
    return __byte_perm(bytes, other, lane_id() % 4 < 2 ? 0x5410 : 0x3276);
  }
};

}  // namespace preflash::sm90
