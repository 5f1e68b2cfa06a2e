// What a position encoding adds to scores: policies, of which ScoreBias is the variant's. The loop
// and the epilogue know their hooks alone.
//
//   of()        the rows of one item, in a thread's registers
//   add_to()    adds what differs among a thread's scores of a row; add_to_first(), in an item's
//               first tile
//   shift()     what that leaves out of a tile's scores, the same for all of a row
//   missing()   what both leave out of all of a row's logits: the LSE's concern
//
// Where products start from biases (Traits::kStartsFromBias), start() takes the place of add_to()
// in all tiles but an item's first one, and shift_of_started() that of shift().
#pragma once

#include "kernels/sm90/forward_mask.cuh"
#include "preflash/alibi.h"

namespace preflash::sm90 {

// ALiBi: slope * (key - token) on top of each logit, for the rows of one item. In units of x that
// is coefficient * (key - token), since x * scale_log2 is the logit in base 2.
//
// The distance counts from the row's last key in place of its token. That takes a constant from
// all of a row's logits, which only the LSE shows (missing()), and lets the keys that matter have
// small biases even in the last row of a long context.
//
// The distance of a key is a constant of its column, one FMA for each score, and the rest, which is
// the same for all of a thread's scores of a row: the softmax adds it to their origin.
//
// Where Traits::kStartsFromBias, not even that FMA is needed. What it adds is the same in every
// tile, so a tile's products are added to it, in the accumulators. A warp reads it from shared
// memory, which takes less from the products than FMAs do. It counts from the thread's last column
// there, the nearest one, so that scores of large weights are added to small numbers.
//
// Rounding: distances are exact, as integers, and as floats up to 2^24. The product of slope and
// distance and the difference to the origin are rounded once each, in the exponents of a whole tile
// alike: 2^-23 of slope * distance, below 1e-3 up to 2^13. A key further away in that sense has no
// weight beside the last ones. Rounding the slope itself tilts a row by less than that.
template <class Traits>
struct AlibiBias {
  using Coordinates = ScoreCoordinates<Traits>;
  static constexpr bool kAdds = true;

  static constexpr int kColumns = Traits::kTileN / 4;  // of one thread
  // The biases of columns 2 i and 2 i + 1 in both of a thread's rows, of each of a warp's threads
  // that have a row in common.
  static constexpr int kRowThreads = 8;
  using Steps = float4[kColumns / 2][kRowThreads];

  // The column that the others count from.
  static constexpr int kOrigin = Traits::kStartsFromBias ? kColumns - 1 : 0;

  float coefficient[Coordinates::kRows];
  int distance[Coordinates::kRows];  // of tile 0 at the thread's column kOrigin, from the last key

  // Each lane computes one of the warp's rows; a quad reads its two from there.
  __device__ __forceinline__ static AlibiBias of(const Coordinates& coordinates) {
    const HopperSegment& params = coordinates.params;
    PackedRow packed = coordinates.packed(coordinates.warp_row + lane_id() % kWarpRows);
    int head = query_head(params, coordinates.state.item, packed);
    float slope = alibi_slope(head, params.num_qo_heads) * params.x_per_logit;
    // NOTE: what a custom mask leaves usually ends at the diagonal, too.
    MaskBounds bounds = coordinates.bounds();
    bounds.causal |= Traits::kHasMaskBits;
    int last_key = bounds.end_key(packed.token) - 1;
    AlibiBias bias;
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      int lane = lane_id() / 4 + r * 8;
      bias.coefficient[r] = __shfl_sync(0xffffffffu, slope, lane);
      bias.distance[r] = origin_column() - __shfl_sync(0xffffffffu, last_key, lane);
    }
    return bias;
  }

  // Where products start from: what differs among a thread's scores of a row.
  __device__ __forceinline__ void put_steps(Steps& steps) const {
    CUTE_UNROLL
    for (int part = 0; part < kColumns / 2; part += 4) {
      int i = part + lane_id() % 4;
      float even = static_cast<float>(i * 8 - kOriginStep);
      steps[i][lane_id() / 4] = {coefficient[0] * even, coefficient[0] * (even + 1.0f),
                                 coefficient[1] * even, coefficient[1] * (even + 1.0f)};
    }
  }
  // accumulator: a thread's, in the order of its registers.
  template <class Accumulator>
  __device__ __forceinline__ static void start(const Steps& steps, Accumulator& accumulator) {
    CUTE_UNROLL
    for (int i = 0; i < kColumns / 2; ++i) {
      float4 step = steps[i][lane_id() / 4];
      accumulator(i * 4) = step.x;
      accumulator(i * 4 + 1) = step.y;
      accumulator(i * 4 + 2) = step.z;
      accumulator(i * 4 + 3) = step.w;
    }
  }

  // Adds what differs among a thread's scores of a row, to the columns of a span: nothing to the
  // column kOrigin.
  template <class Scores>
  __device__ __forceinline__ void add_to(Scores&& scores, ColumnSpan span) const {
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); ++c) {
      if (c == kOrigin || !span.holds(c)) continue;
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        float step = Coordinates::column_step(c) - kOriginStep;
        scores(r, c) = fmaf(coefficient[r], step, scores(r, c));
      }
    }
  }
  // An item's first tile may hold the request's tail, whose keys stand further right.
  template <class Scores>
  __device__ __forceinline__ void add_to_first(const Coordinates& coordinates,
                                               Scores&& scores) const {
    add_to(scores, {0, size<1>(scores)});
    auto tail = coordinates.tail();
    if (tail.shift == 0) return;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      float excess = coefficient[r] * static_cast<float>(tail.shift);
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        if (tail.holds(Coordinates::column(c))) scores(r, c) -= excess;
      }
    }
  }

  // What is left out of a tile's scores: the bias of column kOrigin.
  __device__ __forceinline__ RowShift shift(int tile) const {
    RowShift shift;
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      shift.row[r] = coefficient[r] * static_cast<float>(tile * Traits::kTileN + distance[r]);
    }
    return shift;
  }
  // A lower bound of the coefficients of an item's rows, the same in all warps.
  __device__ __forceinline__ float smallest(const Coordinates& coordinates) const {
    constexpr float kSmallestSlope = 0x1p-8f;  // of all heads, however many there are
    const HopperSegment& params = coordinates.params;
    // NOTE: the rows of a warp have all heads of a small group.
    if (params.group_size > kWarpRows) return kSmallestSlope * params.x_per_logit;
    // The bits of positive floats have their order.
    float smallest = fminf(coefficient[0], coefficient[1]);
    return __uint_as_float(__reduce_min_sync(0xffffffffu, __float_as_uint(smallest)));
  }
  // What all of a row's logits lack: the bias of its last key, from the row's token, or from key 0
  // beside a maximum.
  __device__ __forceinline__ RowShift missing(const Coordinates& coordinates) const {
    RowShift shift;
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      int last_key = origin_column() - distance[r];
      bool from_token = coordinates.params.lse.form == LseForm::kLogSum;
      int origin = from_token ? coordinates.token(r) : 0;
      shift.row[r] = coefficient[r] * static_cast<float>(last_key - origin);
    }
    return shift;
  }

 private:
  static constexpr int kOriginStep = Coordinates::column_step(kOrigin);

  __device__ __forceinline__ static int origin_column() {
    return Coordinates::first_column() + kOriginStep;
  }
};

template <class Traits>
struct NoBias {
  using Coordinates = ScoreCoordinates<Traits>;
  static constexpr bool kAdds = false;

  __device__ __forceinline__ static NoBias of(const Coordinates&) { return {}; }
  template <class Scores>
  __device__ __forceinline__ static void add_to(Scores&&, ColumnSpan) {}
  template <class Scores>
  __device__ __forceinline__ static void add_to_first(const Coordinates&, Scores&&) {}
  __device__ __forceinline__ static NoShift shift(int) { return {}; }
  __device__ __forceinline__ static NoShift missing(const Coordinates&) { return {}; }
};

template <class Traits>
using ScoreBias =
    conditional_t<Traits::kVariant.position == Position::kAlibi, AlibiBias<Traits>, NoBias<Traits>>;

}  // namespace preflash::sm90
