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

#include "kernels/sm90/sliced_operands.cuh"
#include "kernels/sm90/speculative_softmax.cuh"
#include "kernels/sm90/whole_operands.cuh"

namespace preflash::sm90 {

template <class Traits>
struct EightBitOperands : WholeOperands<Traits> {
  using Base = WholeOperands<Traits>;

  static constexpr int kTilesAtOnce = 8;

  // Of the sums; from prepare_o() on, what brings them to the item's last references.
  float reference[2];
  // That the accumulators hold, counted so that an item's first tile moves by itself.
  int tiles = kTilesAtOnce - 1;
  bool has_sums = false;

  __device__ __forceinline__ EightBitOperands(const HopperSegment& params,
                                              SharedStorage<Traits>& smem, int warpgroup,
                                              int thread)
      : Base(params, smem, warpgroup, thread) {}

  template <class Softmax, class Segment>
  __device__ __forceinline__ void add_up(Softmax& softmax, const Segment& segment) {
    this->first_pv = GMMA::ScaleOut::One;
    if (++tiles < kTilesAtOnce) return;
    prepare_o(softmax, segment);
    Tensor parts = recast<float4>(this->tOrO);
    CUTE_UNROLL
    for (int i = 0; i < size(parts); ++i) {
      const float4 next = has_sums ? added(i, parts(i)) : parts(i);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place_of(i)), "f"(next.x),
                   "f"(next.y), "f"(next.z), "f"(next.w)
                   : "memory");
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) reference[r] = softmax.reference[r];
    this->first_pv = GMMA::ScaleOut::Zero;
    tiles = 0;
    has_sums = true;
    softmax.follow(segment);
  }
  template <class Softmax, class Segment>
  __device__ __forceinline__ void prepare_o(const Softmax& softmax, const Segment& segment) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      reference[r] = Softmax::change_of_reference(reference[r], softmax.reference[r],
                                                  segment.logits.scale_log2);
    }
  }
  __device__ __forceinline__ void finish_o() {
    Tensor parts = recast<float4>(this->tOrO);
    if (has_sums) {
      CUTE_UNROLL
      for (int i = 0; i < size(parts); ++i) parts(i) = added(i, parts(i));
    }
    tiles = kTilesAtOnce - 1;
    has_sums = false;
  }

 private:
  // NOTE: the compiler would take these addresses for generic ones.
  __device__ __forceinline__ std::uint32_t place_of(int i) const {
    return cast_smem_ptr_to_uint(&this->smem.sums[this->warpgroup][i][this->thread]);
  }
  // part: of O, two columns of row 0 and of row 1.
  __device__ __forceinline__ float4 added(int i, const float4& part) const {
    float4 sum;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                 : "r"(place_of(i))
                 : "memory");
    return {fmaf(sum.x, reference[0], part.x), fmaf(sum.y, reference[0], part.y),
            fmaf(sum.z, reference[1], part.z), fmaf(sum.w, reference[1], part.w)};
  }
};

template <class Traits>
using OperandsOf = conditional_t<
    Traits::kSliced, SlicedOperands<Traits>,
    conditional_t<Traits::kTransposesV, EightBitOperands<Traits>, WholeOperands<Traits>>>;

}  // namespace preflash::sm90
