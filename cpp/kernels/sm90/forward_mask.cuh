// Where the scores of a consumer warpgroup's tile stand, and which of them its rows keep. What
// treats scores by their place, such as a mask, is a policy on ScoreCoordinates.
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

// Element (r, c) of a thread's scores, as (rows, columns), in one tile of a work item.
template <class Traits>
struct ScoreCoordinates {
  static constexpr int kRows = 2;  // of one thread

  const HopperParams& params;
  const ItemState& state;
  int warp_row;  // the first row of this warp, of the item's tile of rows
  int tile;

  // In the tile with the request's last key the columns from `edge` on lie `shift` further right,
  // because TMA puts the rows of a partial box at its end (tensor_map.h).
  struct Tail {
    int edge;
    int shift;
  };
  __device__ __forceinline__ Tail tail() const {
    int box_rows = params.box.kv_rows;
    int last = state.request.kv_len - first_key();
    if (box_rows == 0 || last >= Traits::kTileN) return {Traits::kTileN, 0};
    int in_box = last % box_rows;
    return {last - in_box, in_box == 0 ? 0 : box_rows - in_box};
  }

  // Rows: of the item's tile, and what they are in the request.
  __device__ __forceinline__ int row(int r) const { return warp_row + lane_id() / 4 + r * 8; }
  __device__ __forceinline__ int token(int r) const { return packed(r).token; }
  __device__ __forceinline__ int head(int r) const {
    return state.item.kv_head * params.group_size + packed(r).head_in_group;
  }

  // Columns: a thread's first one, and how far from there the others lie.
  __device__ __forceinline__ static int first_column() { return lane_id() % 4 * 2; }
  __device__ __forceinline__ static constexpr int column_step(int c) { return c / 2 * 8 + c % 2; }

  // Keys of the request. NOTE: columns [edge, edge + shift) hold zeros, which are no key's.
  __device__ __forceinline__ int first_key() const { return tile * Traits::kTileN; }
  __device__ __forceinline__ int key(int c, const Tail& tail) const {
    int column = first_column() + column_step(c);
    return first_key() + (column < tail.edge ? column : column - tail.shift);
  }
  __device__ __forceinline__ MaskBounds bounds() const {
    return {state.request.qo_len, state.request.kv_len, params.window_left, params.causal};
  }

 private:
  __device__ __forceinline__ PackedRow packed(int r) const {
    return unpack_row(params, state.item.row_begin + row(r));
  }
};

// The columns of a tile that this thread's two rows keep. One word covers the 32 columns that the
// thread holds of 128: bit i is column_step(i) after the thread's first one.
template <class Traits>
struct TileMask {
  static constexpr int kWordColumns = 128;
  static constexpr int kWords = ceil_div(Traits::kTileN, kWordColumns);
  using Coordinates = ScoreCoordinates<Traits>;

  std::uint32_t bits[Coordinates::kRows][kWords];

  // Length, causal and window.
  __device__ __forceinline__ static TileMask of_bounds(const Coordinates& coordinates) {
    MaskBounds bounds = coordinates.bounds();
    auto tail = coordinates.tail();
    int first_key = coordinates.first_key();
    TileMask mask;
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
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
    }
    return mask;
  }

  template <class Scores>
  __device__ __forceinline__ void apply(Scores&& scores) const {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        if (!(bits[r][c / 32] >> c % 32 & 1u)) scores(r, c) = -INFINITY;
      }
    }
  }

 private:
  // The mask bits of the columns before `column`.
  __device__ __forceinline__ static std::uint32_t columns_before(int column) {
    int count = min(max(column / 8 * 2 + min(column % 8, 2), 0), 32);
    return count == 0 ? 0u : 0xffffffffu >> (32 - count);
  }
  __device__ __forceinline__ static std::uint32_t columns_in(int begin, int end) {
    return columns_before(max(end, 0)) & ~columns_before(max(begin, 0));
  }
};

}  // namespace preflash::sm90
