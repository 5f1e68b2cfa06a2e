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
// The distance of a key is the constant column_step(), one FMA for each score, and the rest, which
// is the same for all of a thread's scores of a row: the softmax adds it to their origin.
//
// Where Traits::kStartsFromBias, not even that FMA is needed: a tile's products are added to what
// it would add. FMAs take time from the tensor core, loads of so much from shared memory do as
// well, but integer additions do not. So biases are made as floats between m and 2 m, m a power of
// two: neighbouring keys differ by one integer there (Ramp). Scores then hold m as well, which
// their shift takes out again, and are rounded to 2^-15 to 2^-16 of the bias between neighbouring
// keys.
//
// Rounding: distances are exact, as integers, and as floats up to 2^24. The product of slope and
// distance and the difference to the origin are rounded once each, in the exponents of a whole tile
// alike: 2^-23 of slope * distance, below 1e-3 up to 2^13. A key further away in that sense has no
// weight beside the last ones. Rounding the slope itself tilts a row by less than that.
template <class Traits>
struct AlibiBias {
  using Coordinates = ScoreCoordinates<Traits>;

  // Biases of a tile's columns as floats of one exponent: base + coefficient * step, by the bits of
  // one key and of seven. NOTE: ptxas shall not know that these are multiples. A sum of three terms
  // is no multiply-add, which would run on the pipes of FMAs.
  struct Ramp {
    float base = 0.0f;  // a power of two, larger than what is added
    int one = 0;
    int seven = 0;

    __device__ __forceinline__ static Ramp of(float coefficient) {
      constexpr float kSteps = Traits::kTileN;  // and fewer
      constexpr std::uint32_t kExponent = 0x7f800000u, kOne = 0x00800000u;
      std::uint32_t exponent = __float_as_uint(coefficient * kSteps) & kExponent;
      float base = __uint_as_float(exponent + kOne);
      int one = __float_as_int(base + coefficient) - __float_as_int(base);
      return {base, one, 7 * one};
    }
    __device__ __forceinline__ Ramp of_lane(int lane) const {
      return {__shfl_sync(0xffffffffu, base, lane), __shfl_sync(0xffffffffu, one, lane),
              __shfl_sync(0xffffffffu, seven, lane)};
    }
  };

  float coefficient[Coordinates::kRows];
  Ramp ramp[Coordinates::kRows];     // where products start from biases
  int distance[Coordinates::kRows];  // of tile 0 at the thread's first column, from the last key

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
    Ramp ramp = Ramp::of(slope);
    AlibiBias bias;
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      int lane = lane_id() / 4 + r * 8;
      bias.coefficient[r] = __shfl_sync(0xffffffffu, slope, lane);
      if constexpr (Traits::kStartsFromBias) bias.ramp[r] = ramp.of_lane(lane);
      bias.distance[r] = Coordinates::first_column() - __shfl_sync(0xffffffffu, last_key, lane);
    }
    return bias;
  }

  // Where products start from: what differs among a thread's scores of a row, and `base`. Of rows
  // in the order of an accumulator's registers: (2 columns, rows, columns / 2).
  template <class Accumulator>
  __device__ __forceinline__ void start(Accumulator& accumulator) const {
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      const auto [base, one, seven] = ramp[r];
      int even = __float_as_int(base), odd = even + one;
      CUTE_UNROLL
      for (int i = 0; i < Traits::kTileN / 8; ++i) {
        if (i > 0) {
          even = add(even, seven, one);
          odd = add(odd, seven, one);
        }
        accumulator(i * 4 + r * 2) = __int_as_float(even);
        accumulator(i * 4 + r * 2 + 1) = __int_as_float(odd);
      }
    }
  }

  // Adds what differs among a thread's scores of a row, to the columns of a span: nothing to the
  // thread's first one.
  template <class Scores>
  __device__ __forceinline__ void add_to(Scores&& scores, ColumnSpan span) const {
    CUTE_UNROLL
    for (int c = 1; c < size<1>(scores); ++c) {
      if (!span.holds(c)) continue;
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        float step = Coordinates::column_step(c);
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

  // What add_to() leaves out of a tile's scores.
  __device__ __forceinline__ RowShift shift(int tile) const {
    RowShift shift;
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) {
      shift.row[r] = coefficient[r] * static_cast<float>(tile * Traits::kTileN + distance[r]);
    }
    return shift;
  }
  // What products that started from biases leave out.
  __device__ __forceinline__ RowShift shift_of_started(int tile) const {
    RowShift started = shift(tile);
    CUTE_UNROLL
    for (int r = 0; r < Coordinates::kRows; ++r) started.row[r] -= ramp[r].base;
    return started;
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
      int last_key = Coordinates::first_column() - distance[r];
      bool from_token = coordinates.params.lse.form == LseForm::kLogSum;
      int origin = from_token ? coordinates.token(r) : 0;
      shift.row[r] = coefficient[r] * static_cast<float>(last_key - origin);
    }
    return shift;
  }

 private:
  __device__ __forceinline__ static int add(int a, int b, int c) {
    int sum;
    asm("{ .reg .s32 t; add.s32 t, %1, %2; add.s32 %0, t, %3; }"
        : "=r"(sum)
        : "r"(a), "r"(b), "r"(c));
    return sum;
  }
};

template <class Traits>
struct NoBias {
  using Coordinates = ScoreCoordinates<Traits>;

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
