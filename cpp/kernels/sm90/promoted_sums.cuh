// O over many keys, where products of 8 bits add up. Hopper's tensor core keeps 13 bits behind the
// leading one of the largest of what it adds, and cuts the rest off: each product of e4m3 loses
// half of 2^-13 of the sum so far, and from 2^13 equal ones on they vanish. So the accumulators
// hold so many tiles at most; then they are added to sums of float32 and begin anew. The bias
// towards 0 that this leaves where all values have one sign and all weights are equal is kTiles *
// 128 * 0.7 * 2^-14 of the result at most, 2 % with four tiles; where signs vary the losses do,
// too.
//
// The sums lie in shared memory, 64 numbers of a thread's own: beside S, P and O the registers have
// no room for them.
#pragma once

#include "kernels/sm90/shared_storage.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// With the hooks of AccumulatorAlone.
template <class Traits>
struct PromotedSums {
  static constexpr int kTiles = 4;

  // Of the sums; from prepare() on, what brings them to the item's last references.
  float reference[2];
  int tiles = 0;     // that the accumulators hold
  bool any = false;  // whether there are sums

  template <class Softmax, class Segment, class Out>
  __device__ __forceinline__ GMMA::ScaleOut add(float4 (*sums)[kWarpgroupThreads],
                                                const Softmax& softmax, const Segment& segment,
                                                const Out& out) {
    if (++tiles < kTiles) return GMMA::ScaleOut::One;
    prepare(softmax, segment);
    CUTE_UNROLL
    for (int i = 0; i < Traits::kPartVo / 8; ++i) {
      const std::uint32_t place = place_of(sums, i);
      float4 next = of_rows(out, i);
      if (any) next = added(place, next);
      asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(place), "f"(next.x),
                   "f"(next.y), "f"(next.z), "f"(next.w)
                   : "memory");
    }
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) reference[r] = softmax.reference[r];
    tiles = 0;
    any = true;
    return GMMA::ScaleOut::Zero;
  }
  template <class Softmax, class Segment>
  __device__ __forceinline__ void prepare(const Softmax& softmax, const Segment& segment) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      reference[r] = SpeculativeSoftmax::change_of_reference(reference[r], softmax.reference[r],
                                                             segment.logits.scale_log2);
    }
  }
  template <class Out>
  __device__ __forceinline__ void finish(const float4 (*sums)[kWarpgroupThreads], Out& out) {
    if (any) {
      CUTE_UNROLL
      for (int i = 0; i < Traits::kPartVo / 8; ++i) {
        float4 whole = added(place_of(sums, i), of_rows(out, i));
        out(0, 2 * i) = whole.x;
        out(0, 2 * i + 1) = whole.y;
        out(1, 2 * i) = whole.z;
        out(1, 2 * i + 1) = whole.w;
      }
    }
    tiles = 0;
    any = false;
  }

 private:
  // out: (row, column) view
  template <class Out>
  __device__ __forceinline__ static float4 of_rows(const Out& out, int i) {
    return {out(0, 2 * i), out(0, 2 * i + 1), out(1, 2 * i), out(1, 2 * i + 1)};
  }
  // NOTE: the compiler would take these addresses for generic ones.
  __device__ __forceinline__ static std::uint32_t place_of(const float4 (*sums)[kWarpgroupThreads],
                                                           int i) {
    return cast_smem_ptr_to_uint(&sums[i][threadIdx.x % kWarpgroupThreads]);
  }
  __device__ __forceinline__ float4 added(std::uint32_t place, const float4& out) const {
    float4 sum;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(sum.x), "=f"(sum.y), "=f"(sum.z), "=f"(sum.w)
                 : "r"(place)
                 : "memory");
    return {fmaf(sum.x, reference[0], out.x), fmaf(sum.y, reference[0], out.y),
            fmaf(sum.z, reference[1], out.z), fmaf(sum.w, reference[1], out.w)};
  }
};

// Of products that float32 adds up.
struct AccumulatorAlone {
  // Behind each product but an item's last: whether the accumulators go on.
  template <class Sums, class Softmax, class Segment, class Out>
  __device__ __forceinline__ static GMMA::ScaleOut add(const Sums&, const Softmax&, const Segment&,
                                                       const Out&) {
    return GMMA::ScaleOut::One;
  }
  // The item's last references are there.
  template <class Softmax, class Segment>
  __device__ __forceinline__ static void prepare(const Softmax&, const Segment&) {}
  // All of the item's products are: `out` becomes the whole sum.
  template <class Sums, class Out>
  __device__ __forceinline__ static void finish(const Sums&, Out&) {}
};

template <class Traits>
using SumsOf = conditional_t<Traits::kTransposesV, PromotedSums<Traits>, AccumulatorAlone>;

// Of a warpgroup, in shared memory.
template <class Traits>
__device__ __forceinline__ auto sums_of(SharedStorage<Traits>& smem, int warpgroup) {
  if constexpr (Traits::kTransposesV) {
    return smem.sums[warpgroup];
  } else {
    return Nothing{};
  }
}

}  // namespace preflash::sm90
