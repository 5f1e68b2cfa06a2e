// Asynchronous matrix products of one warpgroup, and views of its accumulators.
#pragma once

#include <cute/tensor.hpp>

namespace preflash::sm90 {

using namespace cute;

// Issues c (+)= a b as one committed group, without waiting for it. a: (MMA, MMA_M, MMA_K) in
// registers or as descriptors, the kDepth steps of the product's depth from first_k on; b: (MMA,
// MMA_N, MMA_K) descriptors; c: (MMA, MMA_M, MMA_N). first: Zero overwrites c, One adds to it.
template <int kDepth, class Mma, class A, class B, class C>
CUTE_DEVICE void multiply_async(Mma& mma, const A& a, int first_k, const B& b, C& c,
                                GMMA::ScaleOut first) {
  constexpr bool kFromRegisters =
      !cute::is_base_of<GMMA::DescriptorIterator, typename Mma::FrgTypeA>::value;
  if constexpr (kFromRegisters) warpgroup_fence_operand(const_cast<A&>(a));
  warpgroup_fence_operand(c);
  warpgroup_arrive();
  mma.accumulate_ = first;
  CUTE_UNROLL
  for (int k = 0; k < kDepth; ++k) {
    gemm(mma, a(_, _, first_k + k), b(_, _, k), c);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

// The same with all columns of a.
CUTE_DEVICE void multiply_async(auto& mma, const auto& a, const auto& b, auto& c,
                                GMMA::ScaleOut first) {
  multiply_async<decltype(size<2>(a))::value>(mma, a, 0, b, c, first);
}

// Waits until at most kPending later groups are in flight: c is complete then.
template <int kPending, class C>
CUTE_DEVICE void wait_for_product(C& c) {
  warpgroup_wait<kPending>();
  warpgroup_fence_operand(c);
}

// ((2, 2, N / 8), MMA_M, MMA_N) accumulator -> (rows of this thread, columns of this thread)
__device__ constexpr auto as_rows_and_columns(auto layout) {
  return make_layout(make_layout(get<0, 1>(layout), get<1>(layout)),
                     make_layout(get<0, 0>(layout), get<0, 2>(layout), get<2>(layout)));
}

// ((2, 2, N / 8), MMA_M, MMA_N) accumulator of one product -> ((2, 2, 2), MMA_M, (N / 16, MMA_N)),
// the A operand of the next.
__device__ constexpr auto as_operand_a(auto layout) {
  auto pairs = logical_divide(get<0, 2>(layout), Tile<Layout<_2>>{});  // ((2, N / 16))
  return make_layout(make_layout(get<0, 0>(layout), get<0, 1>(layout), get<0>(get<0>(pairs))),
                     get<1>(layout), make_layout(get<1>(get<0>(pairs)), get<2>(layout)));
}

}  // namespace preflash::sm90
