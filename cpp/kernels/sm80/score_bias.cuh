// Bias that a position encoding adds to scores: policies, of which ScoreBias is the variant's. The
// loop, the loaders and the epilogue know only their hooks.
//
//   Rows            what shared memory holds of a tile's rows for it
//   present()       whether this launch has it: kernels with options at run time branch
//   note_row()      fills Rows, once for each row as Q is fetched
//   add_to()        adds it to the scores of one tile, or all but a part that rows share
//   count_in_lse()  adds to a row's LSE what add_to() left out
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/log2.cuh"
#include "kernels/common/row_map.cuh"
#include "preflash/alibi.h"
#include "preflash/mask_range.h"
#include "preflash/variant.h"

namespace preflash::sm80 {

using namespace cute;

template <class Traits>
struct RowCoordinates;
template <class Traits>
struct ScoreCoordinates;

// A row of the query tile where its Q is fetched.
struct LoadedRow {
  int tile_row;
  int token;
  int head;
  bool last;  // of the rows that exist
};

struct NoBias {
  struct Rows {};

  __device__ static __forceinline__ bool present(const KernelSegment&) { return false; }
  __device__ static __forceinline__ void note_row(Rows&, const LoadedRow&, const KernelSegment&,
                                                  const MaskBounds&) {}
  template <class Scores, class Coordinates>
  __device__ static __forceinline__ void add_to(Scores&, const Coordinates&, const Rows&) {}
  template <class Coordinates>
  __device__ static __forceinline__ void count_in_lse(PartialLse&, int, const Coordinates&,
                                                      const Rows&) {}
};

// ALiBi: slope * (key - token) on top of each logit.
//
// A row's output does not depend on the key from which distances count. So the loop counts from the
// last key that any row of the tile keeps: all rows share the distances, and biases are small and
// exact for the keys that weigh most. The LSE gets the rest at the end, for every chunk of keys the
// same.
template <class Traits>
struct AlibiBias {
  // Not kept in registers: a tile needs them only for a moment.
  struct Rows {
    float slope[Traits::kTileM];  // in units of x
    int key_origin;               // distances count from here
  };

  __device__ static __forceinline__ bool present(const KernelSegment& params) {
    return !Traits::kOptionsAtRunTime || params.position == Position::kAlibi;
  }

  __device__ static __forceinline__ void note_row(Rows& rows, const LoadedRow& row,
                                                  const KernelSegment& params,
                                                  const MaskBounds& bounds) {
    rows.slope[row.tile_row] =
        alibi_slope(row.head, params.num_qo_heads) * (kLog2E / params.logits.scale_log2);
    // The last row keeps the last key, whichever chunk of the keys this item has.
    if (row.last) rows.key_origin = bounds.end_key(row.token) - 1;
  }

  // scores: x, (rows, columns) of this thread.
  template <class Scores>
  __device__ static __forceinline__ void add_to(Scores& scores, const ScoreCoordinates<Traits>& at,
                                                const Rows& rows) {
    float slope[Traits::kRowsPerThread];
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) slope[r] = rows.slope[at.tile_row(r)];
    // Integers up to 2^24, and every column's distance with them, are exact.
    float first_distance = static_cast<float>(at.key(0) - rows.key_origin);
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      float distance = first_distance + static_cast<float>(at.tile_column(c) - at.tile_column(0));
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        scores(r, c) = fmaf(slope[r], distance, scores(r, c));
      }
    }
  }

  // Counts an LSE from row r's token, as callers do, and a maximum from key 0.
  __device__ static __forceinline__ void count_in_lse(PartialLse& lse, int r,
                                                      const RowCoordinates<Traits>& at,
                                                      const Rows& rows) {
    float slope_log2 = rows.slope[at.tile_row(r)] * at.params.logits.scale_log2;
    if (at.params.lse.form == LseForm::kMaxAndSum) {
      lse.high += slope_log2 * static_cast<float>(rows.key_origin);
      return;
    }
    float rest = __fmul_rn(slope_log2, static_cast<float>(rows.key_origin - at.query(r).token));
    // The rounding error of high goes to low (Knuth's sum): the weights of chunks are differences
    // of two large numbers.
    float sum = lse.high + rest;
    float high = sum - rest;
    lse.low += (lse.high - high) + (rest - (sum - high));
    lse.high = sum;
  }
};

template <class Traits>
using ScoreBias =
    std::conditional_t<Traits::kVariant.position == Position::kAlibi, AlibiBias<Traits>, NoBias>;

}  // namespace preflash::sm80
