// Operands of 8 bits, multiplied as they are stored, with the hooks of WholeOperands. V has been
// transposed on its way (transpose_values.cuh), and O is added up in float32: Hopper's tensor core
// keeps 13 bits behind the leading one of the largest of what it adds, and cuts the rest off. From
// 2^13 equal products on they vanish. An item's first tile is added up by itself, so that a large
// logit in it cuts off no later tile's products (eight_bit_softmax.cuh).
//
// That leaves a bias towards 0 where values have one sign: 1.1 % with random logits. Row sums by
// the same products lose as much, so that the bias cancels in the quotient. A factor of 1.25 gives
// products as many bits as values of e4m3 have on average: 1 would leave 60 % of the bias. Where
// signs of values vary O has no bias and gets that of the sums, about 1 % beside an error of 2.7 %.
// Measured: docs/dev/experiments/fp8-products.md.
#pragma once

#include "kernels/sm90/sliced_operands.cuh"

namespace preflash::sm90 {

template <class Traits>
struct EightBitOperands : WholeOperands<Traits> {
  using Base = WholeOperands<Traits>;

  static constexpr int kTilesAtOnce = 6;
  static constexpr int kParts = Traits::kPartsO;
  static constexpr int kShared = Traits::kSharedSums;

  // References of the sums. From prepare_o() on, the sums' factors to the item's last references.
  float reference[2];
  float4 sums[kParts - kShared];  // of the last parts
  int tiles;                      // in the accumulators
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
    for (int i = 0; i < kParts; ++i) (i < kShared ? shared_sum(i) : sums[i - kShared]) = parts(i);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) reference[r] = softmax.reference[r];
    this->first_pv = GMMA::ScaleOut::Zero;
    tiles = 0;
    has_sums = true;
    softmax.follow(segment, {parts(kParts - 1).x, parts(kParts - 1).z});
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
  CUTE_DEVICE float4& shared_sum(int part) const {
    return this->smem.sums[(this->warpgroup * kShared + part) * kWarpgroupThreads + this->thread];
  }
  // Adds the sums to O. Four are read while the four before are added.
  CUTE_DEVICE void take_sums() {
    if (!__any_sync(0xffffffffu, has_sums)) return;
    constexpr int kGroup = 4;
    Tensor parts = recast<float4>(this->tOrO);
    auto add = [&](int part, const float4& sum) {
      const float4 o = parts(part);
      parts(part) = float4{fmaf(sum.x, reference[0], o.x), fmaf(sum.y, reference[0], o.y),
                           fmaf(sum.z, reference[1], o.z), fmaf(sum.w, reference[1], o.w)};
    };
    float4 read[2][kGroup];
    CUTE_UNROLL
    for (int i = 0; i < min(kGroup, kShared); ++i) read[0][i] = shared_sum(i);
    CUTE_UNROLL
    for (int part = kShared; part < kParts; ++part) add(part, sums[part - kShared]);
    CUTE_UNROLL
    for (int first = 0; first < kShared; first += kGroup) {
      const auto& now = read[first / kGroup % 2];
      auto& next = read[(first / kGroup + 1) % 2];
      CUTE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (first + kGroup + i < kShared) next[i] = shared_sum(first + kGroup + i);
      }
      CUTE_UNROLL
      for (int i = 0; i < min(kGroup, kShared - first); ++i) add(first + i, now[i]);
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
