// A speculative online softmax. It computes a tile's exponentials relative to the row's old
// reference, the row max of the first tile, without finding the tile's row max first. Every
// reference gives the same quotient as long as nothing overflows. The row sums show whether the
// speculation failed: if a thread's part of one exceeds max_sum(), the row's reference moves to its
// true row max, O is rescaled, and the tile's exponentials are computed again. With the same
// reference they have the same bits, so a row's result does not depend on the rows beside it.
#pragma once

#include <cutlass/numeric_conversion.h>

#include "kernels/common/online_softmax.cuh"

namespace preflash::sm90 {

// visit(r): of both rows of a thread.
CUTE_DEVICE void for_rows(const auto& visit) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) visit(r);
}
// visit(r, c, x): of every element x of a (rows, columns) view.
CUTE_DEVICE void for_each_element(auto&& view, const auto& visit) {
  CUTE_UNROLL
  for (int r = 0; r < cute::size<0>(view); ++r) {
    CUTE_UNROLL
    for (int c = 0; c < cute::size<1>(view); ++c) visit(r, c, view(r, c));
  }
}

// A bias that all of a thread's scores of a row lack, in units of x, or a factor above 0: it is
// folded into the exponents. NoShift: neither.
struct RowShift {
  float row[2];

  CUTE_DEVICE float add_to(int r, float x) const { return x + row[r]; }
  CUTE_DEVICE float origin(int r, float origin, float scale_log2) const {
    return fmaf(-row[r], scale_log2, origin);
  }
  CUTE_DEVICE static float scale(int, float scale_log2) { return scale_log2; }
  // Adds the bias to the row's lse, and the sum's rounding error to the low part, unless the low
  // part is to be the logarithm of the weights alone.
  CUTE_DEVICE void add_to(int r, PartialLse& lse, float scale_log2, LseForm form) const {
    float shift = __fmul_rn(row[r], scale_log2);
    float high = lse.high + shift;
    if (form == LseForm::kMaxAndSum) {
      lse.high = high;
      return;
    }
    float added = high - lse.high;
    lse.low += (lse.high - (high - added)) + (shift - added);
    lse.high = high;
  }
};
struct NoShift {
  CUTE_DEVICE static float add_to(int, float x) { return x; }
  CUTE_DEVICE static float origin(int, float origin, float) { return origin; }
  CUTE_DEVICE static float scale(int, float scale_log2) { return scale_log2; }
  CUTE_DEVICE static void add_to(int, PartialLse&, float, LseForm) {}
};
struct RowFactor {
  float row[2];

  CUTE_DEVICE float add_to(int r, float x) const { return x * row[r]; }
  CUTE_DEVICE static float origin(int, float origin, float) { return origin; }
  // Above 0, because masked scores are -inf.
  CUTE_DEVICE float scale(int r, float scale_log2) const {
    return fmaxf(scale_log2 * row[r], FLT_MIN);
  }
};

struct SpeculativeSoftmax : OnlineSoftmax<2> {
  static constexpr int kRows = 2;
  // P of a row's first reference is 2 to this. e4m3's numbers lie in [2^-9, 448].
  static constexpr int exponent_of(DType p_dtype) { return size_of(p_dtype) == 1 ? 4 : 0; }
  // P <= 2^15 stays below float16's largest number, 65504, and float32 sums millions of such terms.
  // bfloat16 has float32's range, so its P may be larger: references move only where logits vary by
  // 2^32, and values of V up to 2^95 do not overflow. 448 is e4m3's largest number.
  static constexpr float max_sum_of(DType p_dtype) {
    return size_of(p_dtype) == 1 ? 448.0f : p_dtype == DType::kBFloat16 ? 0x1p32f : 0x1p15f;
  }
  // Above this sum of a thread's part of a row the row's true maximum is found. With row maxima as
  // output the reference must follow the maximum: a weight above 1 makes a sum larger than 1.
  static constexpr float max_sum(LseForm form, DType p_dtype) {
    return form == LseForm::kMaxAndSum ? 1 << exponent_of(p_dtype) : max_sum_of(p_dtype);
  }

  // Above this |reference| * scale_log2 rounding may shift a row's exponents by more than 2^3, and
  // P soon overflows. An exact origin, as on sm80, would keep such rows right and cost 1 % of short
  // rows (docs/dev/experiments/fa3-softmax-and-options.md). With e4m3 the sum of the origin and
  // exponent_of() is rounded too: below 2^24 each by half a bit, of the 4.8 that P has to spare.
  static constexpr float max_origin_of(DType p_dtype) {
    return size_of(p_dtype) == 1 ? 0x1p24f : 0x1p27f;
  }

  bool has_row_max = false;  // every row of the warp has a reference

  // The hooks of a tile: begin() and update() of an item's first one, before_o(), after_o() and
  // update() of a later one. mma: S, O and P, of which S lacks `shift`, and O the tile. mask():
  // masks S, and returns true if any of it was masked.

  // A row's first tile: its row max becomes the reference, so the speculation cannot fail.
  CUTE_DEVICE void begin(auto& mma, const auto& shift, const auto&) {
    *this = {};
    float tile_max[kRows];
    maxima(mma.rows_of_s(), shift, tile_max);
    init_row_max(tile_max);
  }
  CUTE_DEVICE void update(auto& mma, const auto& shift, const auto& segment) {
    exponentiate(mma.rows_of_s(), shift, mma.tOrP, sum, segment.logits.scale_log2);
  }

  // While O += P V is in flight.
  CUTE_DEVICE static void before_o(auto&, const auto&, const auto&, const auto& mask) { mask(); }
  // O is complete, without this tile.
  CUTE_DEVICE void after_o(auto& mma, const auto& segment) { mma.add_up(*this, segment); }
  CUTE_DEVICE void update(auto& mma, const auto& shift, const auto& segment, const auto&) {
    auto scores = mma.rows_of_s();
    if (!has_row_max) {
      float tile_max[kRows];
      maxima(scores, shift, tile_max);
      init_row_max(tile_max);
    }
    const float scale_log2 = segment.logits.scale_log2;
    const float max_sum = segment.max_sum;
    float tile_sum[kRows];
    exponentiate(scores, shift, mma.tOrP, tile_sum, scale_log2);
    bool moves[kRows];
    for_rows([&](int r) { moves[r] = tile_sum[r] > max_sum; });
    if (__any_sync(0xffffffffu, moves[0] || moves[1])) {
      float tile_max[kRows];
      maxima(scores, shift, tile_max);
      bool moved = move(tile_max, mma.rows_of_o(), moves, scale_log2);
      if (moved) exponentiate(scores, shift, mma.tOrP, tile_sum, scale_log2);
    }
    for_rows([&](int r) { sum[r] += tile_sum[r]; });
  }

  // The factor that converts a sum relative to `from` into one relative to `to`.
  CUTE_DEVICE static float change_of_reference(float from, float to, float scale_log2) {
    if (from == -INFINITY) return 0.0f;
    return exp2_approx(scaled_reference(from, scale_log2) - scaled_reference(to, scale_log2));
  }

  // NaN where the origin is out of range, because the sum is meaningless there. shift: what all
  // scores of a row lack.
  template <DType kP, class Shift>
  CUTE_DEVICE RowResult finish(int r, const Shift& shift, float scale_log2, LseForm form) const {
    float origin = scaled_reference(row_max_ref[r], scale_log2);
    float total = quad_sum(sum[r]);
    RowResult result = result_of(fabsf(origin) >= max_origin_of(kP) ? NAN : total, origin);
    if (exponent_of(kP) != 0) result.lse.low -= exponent_of(kP);
    if (!result.empty) shift.add_to(r, result.lse, scale_log2, form);
    return result;
  }

  // Returns the weight of a logit in base 2, in units of P. NaN as finish() has it.
  template <DType kP>
  CUTE_DEVICE float weight_of(int r, float logit, float scale_log2) const {
    float origin = scaled_reference(row_max_ref[r], scale_log2);
    return fabsf(origin) >= max_origin_of(kP) ? NAN : exp2_approx(logit - origin + exponent_of(kP));
  }

  // The lanes of a row may have different shifts, so they come before the quad's maximum.
  CUTE_DEVICE static void maxima(const auto& scores, const auto& shift, float (&result)[kRows]) {
    thread_maxima(scores, result);
    for_rows([&](int r) { result[r] = quad_max(shift.add_to(r, result[r])); });
  }

 protected:
  // p: words of a row's next weights, of rows 0 and 1 in turn. exp2_of(c, x): 2^x, of a score of
  // column c.
  template <class Exp2, class Scores, class Shift, class P>
  CUTE_DEVICE void exponentiate(const Scores& scores, const Shift& shift, P& p,
                                float (&tile_sum)[kRows], float scale_log2,
                                const Exp2& exp2_of) const {
    using namespace cute;
    using Element = typename P::value_type;
    constexpr int kWord = 4 / sizeof(Element);
    constexpr int kExponent = kWord == 4 ? exponent_of(DType::kFloat8E4M3) : 0;
    Tensor words = recast<cutlass::Array<Element, kWord>>(p);
    cutlass::NumericArrayConverter<Element, float, kWord> convert;
    float offset[kRows], scale[kRows];
    for_rows([&](int r) {
      scale[r] = shift.scale(r, scale_log2);
      offset[r] = shift.origin(r, scaled_reference(row_max_ref[r], scale_log2), scale_log2);
      if (kExponent != 0) offset[r] -= kExponent;
      tile_sum[r] = 0.0f;
    });
    CUTE_UNROLL
    for (int c = 0; c < size<1>(scores); c += kWord) {
      for_rows([&](int r) {
        cutlass::Array<float, kWord> x;
        CUTE_UNROLL
        for (int i = 0; i < kWord; ++i) {
          x[i] = exp2_of(c + i, fmaf(scores(r, c + i), scale[r], -offset[r]));
          tile_sum[r] += x[i];
        }
        words(c / kWord * kRows + r) = convert(x);
      });
    }
  }
  CUTE_DEVICE void exponentiate(const auto& scores, const auto& shift, auto& p,
                                float (&tile_sum)[kRows], float scale_log2) const {
    exponentiate(scores, shift, p, tile_sum, scale_log2,
                 [](int, float x) { return exp2_approx(x); });
  }

  // Raises references to the tile's row max and rescales sums and O, in rows where a lane's `moves`
  // is set. Returns true if a reference of the warp has moved.
  CUTE_DEVICE bool move(const float (&tile_max)[kRows], auto&& out, const bool (&moves)[kRows],
                        float scale_log2) {
    bool moved = false;
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      unsigned quad = __ballot_sync(0xffffffffu, moves[r]) >> (threadIdx.x % 32 & ~3u) & 0xfu;
      if (quad == 0) continue;
      // A large part of a sum may be that of many small weights.
      float next = fmaxf(row_max_ref[r], tile_max[r]);
      float factor = exp2_approx(scaled_reference(row_max_ref[r], scale_log2) -
                                 scaled_reference(next, scale_log2));
      moved |= next != row_max_ref[r];
      row_max_ref[r] = next;
      sum[r] *= factor;
      CUTE_UNROLL
      for (int c = 0; c < cute::size<1>(out); ++c) out(r, c) *= factor;
    }
    return __any_sync(0xffffffffu, moved);
  }

 private:
  // Sets the reference of rows that have none: they have kept no key, and their sums and O are 0.
  CUTE_DEVICE void init_row_max(const float (&tile_max)[kRows]) {
    bool missing = false;
    for_rows([&](int r) {
      if (row_max_ref[r] == -INFINITY) row_max_ref[r] = tile_max[r];
      missing |= row_max_ref[r] == -INFINITY;
    });
    has_row_max = !__any_sync(0xffffffffu, missing);
  }
};

}  // namespace preflash::sm90
