// Operands of 8 bits, multiplied as they are stored, with the hooks of WholeOperands. V has been
// transposed on its way (transpose_values.cuh), and O is added up in float32.
//
// Hopper's tensor core keeps 13 bits behind the leading one of the largest of what it adds, and
// cuts the rest off: each product of e4m3 loses half of 2^-13 of the sum so far, and from 2^13
// equal ones on they vanish. So the accumulators hold kTilesAtOnce tiles at most, are added to sums
// of float32 and begin anew; an item's first tile does by itself, so that a large logit in it cuts
// off no later tile's products (eight_bit_softmax.cuh). What that leaves is a bias towards 0 where
// all values have one sign and all weights are equal: kTilesAtOnce * 128 * 0.7 * 2^-14 of the
// result at most, 4.4 %, and less than half of that with the weights of random logits. Where signs
// vary the losses do, too. Half as many tiles halve the bias and cost 6 to 13 % of the rate.
//
// The sums lie in shared memory, four of a thread's own at a time: beside S, P and O the registers
// have no room for them.
#pragma once

#include "kernels/sm90/paired_operands.cuh"
#include "kernels/sm90/speculative_softmax.cuh"
#include "kernels/sm90/whole_operands.cuh"

namespace preflash::sm90 {

template <class Traits>
struct EightBitOperands : WholeOperands<Traits> {
  using Base = WholeOperands<Traits>;

  static constexpr int kTilesAtOnce = 8;

  // References of the sums; from prepare_o() on, the sums' factors to the item's last references.
  float reference[2];
  int tiles;  // in the accumulators
  bool has_sums = false;

  using Base::Base;

  // The first tile goes to the sums on its own, so `tiles` begins one below its limit.
  CUTE_DEVICE void begin_item(const ItemState& item) {
    Base::begin_item(item);
    tiles = item.begins_late ? 0 : kTilesAtOnce - 1;
  }

  CUTE_DEVICE void add_up(auto& softmax, const auto& segment) {
    this->first_pv = GMMA::ScaleOut::One;
    if (++tiles < kTilesAtOnce) return;
    prepare_o(softmax, segment);
    take_sums();
    Tensor parts = recast<float4>(this->tOrO);
    CUTE_UNROLL
    for (int i = 0; i < size(parts); ++i) sum_of(i) = parts(i);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) reference[r] = softmax.reference[r];
    this->first_pv = GMMA::ScaleOut::Zero;
    tiles = 0;
    has_sums = true;
    softmax.follow(segment);
  }
  template <class Softmax, class Segment>
  CUTE_DEVICE void prepare_o(const Softmax& softmax, const Segment& segment) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      reference[r] = Softmax::change_of_reference(reference[r], softmax.reference[r],
                                                  segment.logits.scale_log2);
    }
  }
  CUTE_DEVICE void finish_o() {
    take_sums();
    has_sums = false;
  }

 private:
  // A part of O is two columns of row 0 and of row 1.
  CUTE_DEVICE float4& sum_of(int part) const {
    return this->smem.sums[this->warpgroup][part][this->thread];
  }
  // Adds the sums to O. Four are read while the four before are added.
  CUTE_DEVICE void take_sums() {
    if (!__any_sync(0xffffffffu, has_sums)) return;
    constexpr int kGroup = 4;
    Tensor parts = recast<float4>(this->tOrO);
    float4 read[2][kGroup];
    CUTE_UNROLL
    for (int i = 0; i < kGroup; ++i) read[0][i] = sum_of(i);
    CUTE_UNROLL
    for (int first = 0; first < size(parts); first += kGroup) {
      const auto& now = read[first / kGroup % 2];
      auto& next = read[(first / kGroup + 1) % 2];
      CUTE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (first + kGroup < size(parts)) next[i] = sum_of(first + kGroup + i);
      }
      CUTE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        const float4 part = parts(first + i);
        parts(first + i) =
            float4{fmaf(now[i].x, reference[0], part.x), fmaf(now[i].y, reference[0], part.y),
                   fmaf(now[i].z, reference[1], part.z), fmaf(now[i].w, reference[1], part.w)};
      }
    }
  }
};

template <class Traits>
using OperandsOf =
    conditional_t<(Traits::kClusterSize > 1), PairedOperands<Traits>,
                  conditional_t<Traits::kSliced, SlicedOperands<Traits>,
                                conditional_t<Traits::kTransposesV, EightBitOperands<Traits>,
                                              WholeOperands<Traits>>>>;

}  // namespace preflash::sm90
