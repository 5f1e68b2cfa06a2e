// Online softmax that guesses: a tile's exponentials are taken from the row's old reference,
// without looking for the tile's maxima first. Any reference gives the same quotient as long as
// nothing overflows, and a row's reference, the maximum of its first tile, is seldom exceeded by
// much. What the guess made of a tile is judged by the sums that the softmax needs anyway: where a
// thread's share of a row exceeds kMostSum the references of such rows move to their true maxima
// and the tile is done again; its scores are still there, since P goes to registers of its own.
// Centered rows know their maxima and never exceed it.
//
// A row's result does not depend on the rows beside it: whether it moves is its own sum's business,
// and doing a tile again with an unmoved reference gives the same bits.
#pragma once

#include "kernels/common/online_softmax.cuh"

namespace preflash::sm90 {

struct SpeculativeSoftmax : OnlineSoftmax<2> {
  static constexpr int kRows = 2;
  // P <= 2^15 stays below float16's 65504; in float32 rows may sum millions of such terms.
  static constexpr float kMostSum = 32768.0f;

  bool settled = false;  // whether every row of the warp has a reference, and none is centered

  // A row's first tile: the references are its maxima, and nothing can exceed them.
  template <class Scores>
  __device__ __forceinline__ void begin(Scores& scores, float scale_log2) {
    reset();
    maxima(scores, reference);
    bool special[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) special[r] = is_huge(__fmul_rn(reference[r], scale_log2));
    settled = !__any_sync(0xffffffffu, special[0] || special[1]);
    if (settled) return;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      center[r] = 0.0f;
      if (special[r] && reference[r] != -INFINITY) set_center(r, scores, reference[r]);
    }
  }
  template <class Scores, class P>
  __device__ __forceinline__ void make_first(const Scores& scores, P& p, float scale_log2) {
    exponentiate(scores, p, sum, scale_log2);
  }

  // scores: (row, column) view of a whole accumulator, x on entry and on return. p: 16-bit, in the
  // scores' storage order. out: (row, column) view of O, without this tile.
  template <class Scores, class P, class Out>
  __device__ __forceinline__ void update(Scores& scores, P& p, Out& out, float scale_log2) {
    if (!settled) settle(scores, out, scale_log2);
    float tile_sum[kRows];
    exponentiate(scores, p, tile_sum, scale_log2);
    bool moves[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) moves[r] = tile_sum[r] > kMostSum;
    if (__any_sync(0xffffffffu, moves[0] || moves[1])) {
      move(scores, out, moves, scale_log2);
      exponentiate(scores, p, tile_sum, scale_log2);
    }
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) sum[r] += tile_sum[r];
  }

  __device__ __forceinline__ RowResult finish(int r, float scale_log2) const {
    return finish_row(r, scale_log2, settled ? 0.0f : center[r]);
  }

 private:
  // First references, and centered rows. Rows without a reference have kept nothing: their sums and
  // O are 0.
  template <class Scores, class Out>
  __device__ __forceinline__ void settle(Scores& scores, Out& out, float scale_log2) {
    float tile_max[kRows];
    maxima(scores, tile_max);
    bool special = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (center[r] != 0.0f) {
        move_center(r, scores, out, tile_max[r], scale_log2);
        special = true;
        continue;
      }
      if (reference[r] != -INFINITY) continue;
      reference[r] = tile_max[r];
      if (!is_huge(__fmul_rn(tile_max[r], scale_log2))) continue;
      if (tile_max[r] != -INFINITY) set_center(r, scores, tile_max[r]);
      special = true;
    }
    settled = !__any_sync(0xffffffffu, special);
  }
  template <class Scores>
  __device__ __forceinline__ void set_center(int r, Scores& scores, float value) {
    center[r] = value;
    reference[r] = 0.0f;
    subtract(r, scores, value);
  }

  template <class Scores, class Out>
  __device__ __forceinline__ void move(Scores& scores, Out& out, const bool (&moves)[kRows],
                                       float scale_log2) {
    using namespace cute;
    float tile_max[kRows];
    maxima(scores, tile_max);
    bool huge = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (settled) center[r] = 0.0f;
      unsigned quad = __ballot_sync(0xffffffffu, moves[r]) >> (threadIdx.x % 32 & ~3u) & 0xfu;
      if (quad == 0) continue;
      float next = scaled_reference(tile_max[r], scale_log2);
      float factor = exp2_approx(scaled_reference(reference[r], scale_log2) - next);
      if (is_huge(next)) {
        factor = factor_to_center(factor, tile_max[r], scale_log2);
        set_center(r, scores, tile_max[r]);
        huge = true;
      } else {
        reference[r] = tile_max[r];
      }
      sum[r] *= factor;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(out); ++c) out(r, c) *= factor;
    }
    if (__any_sync(0xffffffffu, huge)) settled = false;
  }

  template <class Scores, class P>
  __device__ __forceinline__ void exponentiate(const Scores& scores, P& p, float (&tile_sum)[kRows],
                                               float scale_log2) const {
    using namespace cute;
    using Element = typename P::value_type;
    Tensor pairs = recast<cutlass::Array<Element, 2>>(p);
    cutlass::NumericArrayConverter<Element, float, 2> convert;
    float offset[kRows];
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      offset[r] = scaled_reference(reference[r], scale_log2);
      tile_sum[r] = 0.0f;
    }
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); c += 2) {
      CUTE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        cutlass::Array<float, 2> x;
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          x[i] = exp2_approx(fmaf(scores(r, c + i), scale_log2, -offset[r]));
          tile_sum[r] += x[i];
        }
        pairs(c / 2 * kRows + r) = convert(x);
      }
    }
  }
};

}  // namespace preflash::sm90
