// K and V in slices of 128 columns, with the hooks of WholeOperands. A slice is released when its
// product is complete. There are no turns, and no tile is passed over: both warpgroups release a
// slot, and the ring of kernels with two CTAs to an item is shorter than a step, so that a
// warpgroup waiting for its turn would keep the other from its slices.
#pragma once

#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/whole_operands.cuh"

namespace preflash::sm90 {

template <class Traits>
struct SlicedOperands : Accumulators<Traits> {
  using Base = Accumulators<Traits>;
  using Base::smem;
  using Base::thread;
  using typename Base::MmaPv;
  using typename Base::MmaQk;

  static_assert(Traits::kSliceSlots >= 4 && Traits::kVariant.sparsity == Sparsity::kDense);

  int num_k;             // slices of a K tile
  bool holds_k = false;  // the last slice of K, which S is made of
  ConsumerPipelineState<Traits::kSliceSlots> next = {};
  ConsumerPipelineState<Traits::kSliceSlots> held = {};  // the first that is not released

  CUTE_DEVICE SlicedOperands(const HopperSegment& params, SharedStorage<Traits>& smem,
                             int warpgroup, int thread)
      : Base(smem, warpgroup, thread), num_k(slices_of_k<Traits>(params)) {}

  CUTE_DEVICE static void order_barrier_wait() {}
  CUTE_DEVICE static void order_barrier_arrive() {}

  CUTE_DEVICE void issue_qk(const auto& tSrQ) {
    issue_qk_slice(tSrQ, 0, wait_for_slice());
#pragma unroll 1
    for (int slice = 1; slice < num_k; ++slice) {
      issue_qk_slice(tSrQ, slice, wait_for_slice());
      warpgroup_wait<1>();
      release_slice();
    }
    holds_k = true;
  }
  CUTE_DEVICE void issue_pv() { issue_pv_of(this->first_pv); }
  template <bool kPvBehind>
  CUTE_DEVICE void wait_for_s() {
    wait_for_product<kPvBehind ? 2 : 0>(this->tSrS);
  }
  CUTE_DEVICE void wait_for_o() { wait_for_product<0>(this->tOrO); }

  CUTE_DEVICE void release_k() {
    if (holds_k) release_slice();
    holds_k = false;
  }
  CUTE_DEVICE void release_v() {
    release_slice();
    release_slice();
  }
  CUTE_DEVICE static void skip_k() {}
  CUTE_DEVICE static void skip_v() {}

 protected:
  // first: Zero overwrites O, One adds to it.
  CUTE_DEVICE void issue_pv_of(GMMA::ScaleOut first) {
    issue_pv_slice(0, first);
    issue_pv_slice(1, first);
  }
  CUTE_DEVICE void release_slice() {
    release(smem.slice.ring.empty[held.index()]);
    held.advance();
  }

 private:
  // Returns the slot of the next slice.
  CUTE_DEVICE int wait_for_slice() {
    const int slot = next.index();
    smem.slice.ring.full[slot].wait(next.phase());
    next.advance();
    return slot;
  }
  CUTE_DEVICE void issue_qk_slice(const auto& tSrQ, int slice, int slot) {
    constexpr int kDepth = Traits::kSliceColumns / 16;
    MmaQk mma;
    Tensor sK = make_tensor(make_smem_ptr(&smem.slices[0][0]),
                            typename Traits::LayoutSliceK{});      // (n, columns, slots)
    Tensor tSrK = mma.get_slice(thread).partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, slots)
    multiply_async<kDepth>(mma, tSrQ, slice * kDepth, tSrK(_, _, _, slot), this->tSrS,
                           slice == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
  }
  // slice: of the columns of O. first: as above.
  CUTE_DEVICE void issue_pv_slice(int slice, GMMA::ScaleOut first) {
    const int slot = wait_for_slice();
    using Part = decltype(partition_fragment_C(MmaPv{}, Shape<_64, Int<Traits::kMmaColumnsPv>>{}));
    MmaPv mma;
    Tensor sV = make_tensor(make_smem_ptr(&smem.slices[0][0]),
                            typename Traits::LayoutSliceV{});      // (columns, n, slots)
    Tensor tOrV = mma.get_slice(thread).partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, slots)
    Tensor part = make_tensor(&this->tOrO(0) + slice * size(Part{}), typename Part::layout_type{});
    multiply_async(mma, this->tOrP, tOrV(_, _, _, slot), part, first);
  }
};

}  // namespace preflash::sm90
