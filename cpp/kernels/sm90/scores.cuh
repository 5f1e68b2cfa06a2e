// Operations on a tile's scores between Q K^T and the mask: factors of heads, the soft cap
// (soft_cap.cuh), and the bias of a position encoding, a policy, of which ScoreBias is the
// variant's:
//   of()        the rows of one item, in a thread's registers
//   issue()     has the tensor core add the part that differs among a thread's scores of a row
//   add_to()    adds that part where issue() does not; add_to_first() the rest in the first tile
//   shift()     the rest of a tile's bias, the same for all of a thread's scores of a row
//   missing()   what both leave out of all of a row's logits: the LSE needs it
#pragma once

#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/warpgroup_mma.cuh"
#include "preflash/alibi.h"

namespace preflash::sm90 {

// ALiBi: slope * (key - token) on top of each logit, for the rows of one item. In units of x that
// is coefficient * (key - token), since x * scale_log2 is the logit in base 2. A key's distance is
// a constant of its column, one FMA for each score, and a rest that all of a thread's scores of a
// row share: the softmax adds the rest to their origin.
//
// The distance counts from the row's last key in place of its token. That takes a constant from
// all of a row's logits, which only the LSE shows (missing()), and lets the keys that matter have
// small biases even in the last row of a long context.
//
// Rounding: distances are exact up to 2^24. Their products with the slope, and the differences to
// the origin, are rounded once each, alike in a whole tile: 2^-23 of slope * distance, below 1e-3
// up to 2^13. A key further away in that sense has no weight beside the last ones.
template <class Traits>
struct AlibiBias {
  using Coordinates = ScoreCoordinates<Traits>;

  float coefficient[Coordinates::kRows];
  int distance[Coordinates::kRows];  // of the thread's first column of tile 0, from the last key

  CUTE_DEVICE static AlibiBias of(const Coordinates& coordinates) {
    const HopperSegment& params = coordinates.params;
    PackedRow packed = coordinates.packed(coordinates.warp_row + lane_id() % kWarpRows);
    float slope = alibi_slope(coordinates.query_head(packed), params.num_qo_heads);
    slope *= params.x_per_logit;
    if (Traits::kOptionsAtRunTime && params.position != Position::kAlibi) slope = 0.0f;
    // The keys of a custom mask usually end at the diagonal too.
    MaskBounds bounds = coordinates.bounds();
    bounds.causal |= params.mask == Mask::kCustom;
    int last_key = bounds.end_key(packed.token) - 1;
    AlibiBias bias;
    for_rows([&](int r) {
      int lane = lane_id() / 4 + r * 8;
      bias.coefficient[r] = __shfl_sync(0xffffffffu, slope, lane);
      bias.distance[r] = Coordinates::first_column() - __shfl_sync(0xffffffffu, last_key, lane);
    });
    return bias;
  }

  CUTE_DEVICE static void issue(SharedStorage<Traits>&, auto&) {}
  // Adds what differs among a thread's scores of a row: nothing to its first column.
  CUTE_DEVICE void add_to(auto&& scores) const {
    CUTE_UNROLL
    for (int c = 1; c < size<1>(scores); ++c) {
      CUTE_UNROLL
      for (int r = 0; r < size<0>(scores); ++r) {
        float step = Coordinates::column_step(c);
        scores(r, c) = fmaf(coefficient[r], step, scores(r, c));
      }
    }
  }
  // An item's first tile may hold the request's tail, whose keys stand further right.
  CUTE_DEVICE void add_to_first(const Coordinates& coordinates, auto&& scores) const {
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

  // Returns the bias that a tile's scores leave out: that of the thread's first column.
  CUTE_DEVICE RowShift shift(int tile) const {
    RowShift shift;
    for_rows([&](int r) {
      int first_key = own_tile<Traits>(tile) * Traits::kTileN;
      shift.row[r] = coefficient[r] * static_cast<float>(first_key + distance[r]);
    });
    return shift;
  }
  // Returns the bias that all of a row's logits lack: that of its last key, from the row's token,
  // or from key 0 if the row maximum is output.
  CUTE_DEVICE RowShift missing(const Coordinates& coordinates) const {
    RowShift shift;
    for_rows([&](int r) {
      int last_key = Coordinates::first_column() - distance[r];
      bool from_token = coordinates.params.lse.form == LseForm::kLogSum;
      int origin = from_token ? coordinates.token(r) : 0;
      shift.row[r] = coefficient[r] * static_cast<float>(last_key - origin);
    });
    return shift;
  }
};

// ALiBi's column part by the tensor core, from an item's second tile on: FMAs would delay the
// products and the exponentials. A row of the A operand is the row's coefficient in three parts of
// 8 bits, which hold its 24 bits exactly; a row of the B operand repeats the column's step, an
// integer below 2^8. So the products are exact, and are rounded as those of Q and K.
template <class Traits>
struct AlibiProduct : AlibiBias<Traits> {
  using Coordinates = ScoreCoordinates<Traits>;
  using Base = AlibiBias<Traits>;

  std::uint32_t parts[Coordinates::kRows];  // two columns of the A operand

  CUTE_DEVICE static AlibiProduct of(const Coordinates& coordinates) {
    AlibiProduct bias{Base::of(coordinates), {}};
    for_rows([&](int r) {
      // Lane i of a quad has part i. Nothing is left for lane 3.
      float part = bias.coefficient[r];
      CUTE_UNROLL
      for (int i = 0; i < 3; ++i) {
        float first = __uint_as_float(__float_as_uint(part) & 0xffff0000u);
        if (i < lane_id() % 4) part -= first;
      }
      bias.parts[r] = __float_as_uint(part) >> 16;
    });
    return bias;
  }
  CUTE_DEVICE static void fill_steps(SharedStorage<Traits>& smem) {
    for (int i = threadIdx.x; i < Traits::kTileN * 16; i += Traits::kThreads) {
      int column = i % Traits::kTileN;
      steps(smem)(column, i / Traits::kTileN) = bfloat16_t(column / 8 * 8 + column % 2);
    }
    cutlass::arch::fence_view_async_shared();
  }

  // tSrS: the accumulator of Q K^T, which may be in flight.
  CUTE_DEVICE void issue(SharedStorage<Traits>& smem, auto& tSrS) const {
    typename Traits::MmaBias mma;
    Tensor a = make_tensor<bfloat16_t>(Shape<Shape<_2, _2, _2>, _1, _1>{});  // (MMA, MMA_M, MMA_K)
    Tensor words = recast<std::uint32_t>(a);
    CUTE_UNROLL
    for (int i = 0; i < size(words); ++i) words(i) = i < Coordinates::kRows ? parts[i] : 0u;
    Tensor b = mma.get_slice(0).partition_fragment_B(steps(smem));
    multiply_async(mma, a, b, tSrS, GMMA::ScaleOut::One);
  }
  CUTE_DEVICE static void add_to(auto&&) {}
  CUTE_DEVICE void add_to_first(const Coordinates& coordinates, auto&& scores) const {
    Base::add_to(scores);
    Base::add_to_first(coordinates, scores);
  }

 private:
  // (n, 16)
  CUTE_DEVICE static auto steps(SharedStorage<Traits>& smem) {
    return make_tensor(make_smem_ptr(smem.bias_steps.data()), typename Traits::LayoutSteps{});
  }
};

template <class Traits>
struct NoBias {
  using Coordinates = ScoreCoordinates<Traits>;

  CUTE_DEVICE static NoBias of(const Coordinates&) { return {}; }
  CUTE_DEVICE static void issue(SharedStorage<Traits>&, auto&) {}
  CUTE_DEVICE static void add_to(auto&&) {}
  CUTE_DEVICE static void add_to_first(const Coordinates&, auto&&) {}
  CUTE_DEVICE static NoShift shift(int) { return {}; }
  CUTE_DEVICE static NoShift missing(const Coordinates&) { return {}; }
};

template <class Traits>
using ScoreBias = conditional_t<Traits::kBiasByProduct, AlibiProduct<Traits>,
                                conditional_t<Traits::kVariant.position == Position::kAlibi,
                                              AlibiBias<Traits>, NoBias<Traits>>>;

// Bias and factors of one item's rows, in a thread's registers.
template <class Traits>
struct Scores {
  using Coordinates = ScoreCoordinates<Traits>;
  // True if factors above 0 are left to the exponents. Where most are 1 their registers would cost
  // more: e4m3 queries lose 1 to 3 % of short rows (docs/dev/experiments/fp8-products.md).
  static constexpr bool kScales = Traits::kQuantizesQ;

  ScoreBias<Traits> bias;
  // Factors of heads, with 8-bit queries and keys, and the powers of two of rows of Q that were
  // narrowed or quantised.
  float factor[Coordinates::kRows];
  bool any_factor;  // multiply() has something to do in the warp

  CUTE_DEVICE static Scores of(const Coordinates& of_item, const auto& query) {
    Scores scores{ScoreBias<Traits>::of(of_item)};
    if constexpr (Traits::kTakes8Bits) {
      const RunExtras& extras = of_item.params.extras;
      float of_k = 1.0f;
      if (extras.scale_k != nullptr) of_k = __ldg(extras.scale_k + of_item.item.kv_head);
      for_rows([&](int r) {
        scores.factor[r] = of_k * query.scale(of_item, r);
        if (extras.scale_q != nullptr) {
          scores.factor[r] *= __ldg(extras.scale_q + of_item.head(r));
        }
      });
      scores.any_factor =
          __any_sync(0xffffffffu, scores.before_mask(0) != 1.0f || scores.before_mask(1) != 1.0f);
    }
    return scores;
  }

  // The softmax applies this to all of a thread's scores of a row: it adds a bias, or multiplies by
  // a factor.
  CUTE_DEVICE auto shift(int tile) const {
    if constexpr (kScales) {
      return RowFactor{scales(0) ? factor[0] : 1.0f, scales(1) ? factor[1] : 1.0f};
    } else {
      return bias.shift(tile);
    }
  }

  CUTE_DEVICE void multiply(auto&& scores) const {
    if constexpr (Traits::kTakes8Bits) {
      if (!any_factor) return;
      const float by[2] = {before_mask(0), before_mask(1)};
      for_each_element(scores, [&](int r, int, float& x) { x *= by[r]; });
    }
  }
  // mma: S, to which issue_bias() adds while the products run.
  CUTE_DEVICE void issue_bias(auto& mma) const { bias.issue(mma.smem, mma.tSrS); }
  CUTE_DEVICE void finish(const HopperSegment& segment, auto& mma) const {
    auto scores = mma.rows_of_s();
    multiply(scores);
    if constexpr (Traits::kCaps && !Traits::kCapsInSoftmax) {
      segment.cap.apply(scores, segment.logits);
    }
    bias.add_to(scores);
  }
  // The form for an item's first tile.
  CUTE_DEVICE void finish(const Coordinates& first, auto& mma) const {
    const HopperSegment& segment = first.params;
    if constexpr (Traits::kCapsInSoftmax) segment.cap.apply(mma.rows_of_s(), segment.logits);
    finish(segment, mma);
    bias.add_to_first(first, mma.rows_of_s());
  }

 private:
  // True if the softmax multiplies the row's scores: -inf, which the mask puts there, allows
  // factors above 0 alone.
  CUTE_DEVICE bool scales(int r) const { return kScales && factor[r] > 0.0f; }
  CUTE_DEVICE float before_mask(int r) const { return scales(r) ? 1.0f : factor[r]; }
};

}  // namespace preflash::sm90
