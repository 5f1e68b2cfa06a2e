// The operands and accumulators of one consumer warpgroup, and its two matrix products.
#pragma once

#include "kernels/common/logits.cuh"
#include "kernels/sm90/forward_traits.cuh"
#include "kernels/sm90/warpgroup_mma.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ForwardProducts {
  using MmaQk = typename Traits::MmaQk;
  using MmaPv = typename Traits::MmaPv;
  using AccumulatorS = decltype(partition_fragment_C(MmaQk{}, Shape<_64, Int<Traits::kTileN>>{}));
  using AccumulatorO = decltype(partition_fragment_C(MmaPv{}, Shape<_64, Int<Traits::kPartVo>>{}));
  using OperandP = decltype(make_tensor<typename Traits::ElementP>(
      as_operand_a(typename AccumulatorS::layout_type{})));

  SharedStorage<Traits>& smem;
  int warpgroup;                                   // among consumers
  int thread;                                      // of the warpgroup
  AccumulatorS tSrS;                               // ((2, 2, N / 8), 1, 1)
  OperandP tOrP;                                   // ((2, 2, 2), 1, N / 16)
  AccumulatorO tOrO;                               // ((2, 2, D / 8), 1, slices of V, or 1)
  GMMA::ScaleOut first_pv = GMMA::ScaleOut::Zero;  // what the next P V does with the old O

  __device__ __forceinline__ ForwardProducts(SharedStorage<Traits>& smem, int warpgroup, int thread)
      : smem(smem), warpgroup(warpgroup), thread(thread) {}

  // (rows, columns) of this thread
  __device__ __forceinline__ auto rows_of_s() {
    return make_tensor(tSrS.data(), as_rows_and_columns(tSrS.layout()));
  }
  __device__ __forceinline__ auto rows_of_o() {
    return make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));
  }

  // This warpgroup's rows of one Q buffer: (MMA, MMA_M, MMA_K)
  __device__ __forceinline__ auto q(int stage) const {
    Tensor sQ = local_tile(make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{}),
                           Shape<_64, Int<Traits::kHeadQk>, Int<Traits::kQStages>>{},
                           make_coord(warpgroup, 0, 0));  // (64, d, q stages)
    return MmaQk{}.get_slice(thread).partition_fragment_A(sQ)(_, _, _, stage);
  }

  // S = Q K^T, or S += Q K^T
  template <class Q>
  __device__ __forceinline__ void issue_qk(const Q& tSrQ, int k_stage,
                                           GMMA::ScaleOut old_s = GMMA::ScaleOut::Zero) {
    MmaQk mma;
    Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::LayoutK{});  // (n, d, stages)
    Tensor tSrK = mma.get_slice(thread).partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, stages)
    multiply_async(mma, tSrQ, tSrK(_, _, _, k_stage), tSrS, old_s);
  }
  template <int kPending>
  __device__ __forceinline__ void wait_qk() {
    wait_for_product<kPending>(tSrS);
  }

  // O += P V
  __device__ __forceinline__ void issue_pv(int v_stage) {
    MmaPv mma;
    Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::LayoutV{});  // (d, n, stages)
    Tensor tOrV = mma.get_slice(thread).partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, stages)
    multiply_async(mma, tOrP, tOrV(_, _, _, v_stage), tOrO, first_pv);
  }
  // The same, with work on S between its steps of 16 keys, while the tensor core computes them:
  // work(span) on a span of a thread's columns after each step from the one on at which S is
  // complete. kAhead steps are in flight before S is waited for.
  template <int kAhead, class Work>
  __device__ __forceinline__ void issue_pv_amid(int v_stage, const Work& work) {
    constexpr int kSteps = decltype(size<2>(tOrP))::value;
    constexpr int kColumns = Traits::kTileN / 4;  // of one thread
    constexpr int kSpans = kSteps - kAhead + 1;
    MmaPv mma;
    Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::LayoutV{});  // (d, n, stages)
    Tensor tOrV = mma.get_slice(thread).partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, stages)
    warpgroup_fence_operand(tOrP);
    warpgroup_fence_operand(tOrO);
    mma.accumulate_ = first_pv;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      // NOTE: again after each span, because the work has written registers.
      if (step == 0 || step >= kAhead) warpgroup_arrive();
      gemm(mma, tOrP(_, _, step), tOrV(_, _, step, v_stage), tOrO);
      mma.accumulate_ = GMMA::ScaleOut::One;
      int span = step - (kAhead - 1);
      if (span < 0) continue;
      if (span == 0) {
        warpgroup_commit_batch();
        wait_qk<1>();
      }
      work(ColumnSpan{span * kColumns / kSpans, (span + 1) * kColumns / kSpans});
    }
    warpgroup_arrive();
    warpgroup_commit_batch();
  }
  __device__ __forceinline__ void wait_pv() { wait_for_product<0>(tOrO); }

  // The slice's part of S = Q K^T
  template <class Q>
  __device__ __forceinline__ void issue_qk_slice(const Q& tSrQ, int slice, int slot) {
    constexpr int kDepth = Traits::kSliceColumns / 16;
    MmaQk mma;
    Tensor sK = make_tensor(make_smem_ptr(&smem.slices[0][0]),
                            typename Traits::LayoutSliceK{});      // (n, columns, slots)
    Tensor tSrK = mma.get_slice(thread).partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, slots)
    multiply_async<kDepth>(mma, tSrQ, slice * kDepth, tSrK(_, _, _, slot), tSrS,
                           slice == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
  }
  // The slice's columns of O += P V
  __device__ __forceinline__ void issue_pv_slice(int slice, int slot) {
    using Part = decltype(partition_fragment_C(MmaPv{}, Shape<_64, Int<Traits::kMmaColumnsPv>>{}));
    MmaPv mma;
    Tensor sV = make_tensor(make_smem_ptr(&smem.slices[0][0]),
                            typename Traits::LayoutSliceV{});      // (columns, n, slots)
    Tensor tOrV = mma.get_slice(thread).partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, slots)
    Tensor part = make_tensor(&tOrO(0) + slice * size(Part{}), typename Part::layout_type{});
    multiply_async(mma, tOrP, tOrV(_, _, _, slot), part, first_pv);
  }
};

}  // namespace preflash::sm90
