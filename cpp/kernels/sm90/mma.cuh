// Q, K and V in whole tiles, as a consumer warpgroup waits for them, multiplies and releases them,
// and its accumulators. SlicedMma, PairedMma and EightBitMma have the same hooks:
//
//   issue_qk()                      S = Q K^T, when K has arrived and it is this warpgroup's turn
//   issue_pv()                      O (+)= P V, when V has arrived
//   order_barrier_arrive()          the next warpgroup's turn begins
//   wait_for_s(), wait_for_o()      the product is complete, and the operands' buffers are released
//   add_up(), prepare_o(), finish_o()  where O is added up in float32
//   skip_q(), skip_k(), skip_v()    of an item or tile that only other warpgroups compute
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"
#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/warpgroup_mma.cuh"

namespace preflash::sm90 {

// The accumulators of a consumer warpgroup, and its Q.
template <class Traits>
struct Accumulators {
  using MmaQk = typename Traits::MmaQk;
  using MmaPv = typename Traits::MmaPv;
  using AccumulatorS = decltype(partition_fragment_C(MmaQk{}, Shape<_64, Int<Traits::kTileN>>{}));
  using AccumulatorO = decltype(partition_fragment_C(
      MmaPv{}, Shape<_64, Int<Traits::kPartVo + Traits::kRowSumColumns>>{}));
  using OperandP = decltype(make_tensor<typename Traits::ElementP>(
      partition_shape_A(MmaPv{}, Shape<_64, Int<Traits::kTileN>>{})));

  SharedStorage<Traits>& smem;
  int warpgroup;                                   // among consumers
  int thread;                                      // of the warpgroup
  AccumulatorS tSrS;                               // ((2, 2, N / 8), 1, 1)
  OperandP tOrP;                                   // ((2, 2, 2), 1, N / 16); 8 bits: (4, ...)
  AccumulatorO tOrO;                               // ((2, 2, D / 8), 1, slices of V, or 1)
  GMMA::ScaleOut first_pv = GMMA::ScaleOut::Zero;  // the next P V overwrites O; One: adds to it
  ConsumerPipelineState<Traits::kQStages> q_read = {};

  CUTE_DEVICE Accumulators(SharedStorage<Traits>& smem, int warpgroup, int thread)
      : smem(smem), warpgroup(warpgroup), thread(thread) {}

  // (rows, columns) of this thread
  CUTE_DEVICE auto rows_of_s() {
    return make_tensor(tSrS.data(), as_rows_and_columns(tSrS.layout()));
  }
  CUTE_DEVICE auto rows_of_o() {
    return make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));
  }

  // This warpgroup's rows of the Q buffer: (MMA, MMA_M, MMA_K)
  CUTE_DEVICE auto q() const {
    Tensor sQ = local_tile(make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{}),
                           Shape<_64, Int<Traits::kHeadQk>, Int<Traits::kQStages>>{},
                           make_coord(warpgroup, 0, 0));  // (64, d, q stages)
    return MmaQk{}.get_slice(thread).partition_fragment_A(sQ)(_, _, _, q_read.index());
  }
  // q_read advances later, when the warpgroup has come to the item's end.
  CUTE_DEVICE void release_q() { release(smem.barriers.q.empty[q_read.index()]); }
  CUTE_DEVICE void skip_q() {
    // NOTE: Q must have arrived: until then its buffer may still count for the item before.
    smem.barriers.q.full[q_read.index()].wait(q_read.phase());
    __syncwarp();
    release_q();
    q_read.advance();
  }

  CUTE_DEVICE void begin_item(const ItemState&) { first_pv = GMMA::ScaleOut::Zero; }
  // O has a P V that is not an item's last one: the next one adds to it.
  CUTE_DEVICE void add_up(const auto&, const auto&) { first_pv = GMMA::ScaleOut::One; }
  // Hooks at an item's end: its last references are final; all of O is complete.
  CUTE_DEVICE static void prepare_o(const auto&, const auto&) {}
  CUTE_DEVICE static void finish_o() {}
};

template <class Traits>
struct WholeMma : Accumulators<Traits> {
  using Base = Accumulators<Traits>;
  using Base::smem;
  using Base::thread;
  using Base::warpgroup;
  using typename Base::MmaPv;
  using typename Base::MmaQk;

  // A turn at the tensor core ends when the products are issued. Under a soft cap, where scores
  // take as long as products, it ends when the products are complete, so two warpgroups alternate.
  // Four take no turns where more than products keeps them busy (measured:
  // docs/dev/experiments/fa3-softmax-and-options.md).
  static constexpr bool kTurnEndsWithO = Traits::kCapsInSoftmax && Traits::kConsumers == 2;
  static constexpr bool kTakesTurns =
      Traits::kConsumers == 2 || !(Traits::kCapsInSoftmax || Traits::kBiasByProduct);

  bool in_turn = false;
  ConsumerPipelineState<Traits::kStages> k_read = {};
  ConsumerPipelineState<Traits::kStages> v_read = {};

  // One warpgroup at a time issues its products: 0, 1, ... and 0 again. At the start the last
  // warpgroup ends its turn for warpgroup 0.
  CUTE_DEVICE WholeMma(const HopperSegment&, SharedStorage<Traits>& smem, int warpgroup, int thread)
      : Base(smem, warpgroup, thread) {
    if (warpgroup == Traits::kConsumers - 1) end_turn();
  }

  CUTE_DEVICE void issue_qk() {
    order_barrier_wait();
    MmaQk mma;
    Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::LayoutK{});  // (n, d, stages)
    Tensor tSrK = mma.get_slice(thread).partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, stages)
    multiply_async(mma, this->q(), tSrK(_, _, _, k_read.index()), this->tSrS, GMMA::ScaleOut::Zero);
  }
  CUTE_DEVICE void issue_pv() {
    smem.barriers.v.full[v_read.index()].wait(v_read.phase());
    MmaPv mma;
    Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::LayoutV{});  // (d, n, stages)
    Tensor tOrV = mma.get_slice(thread).partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, stages)
    multiply_async(mma, this->tOrP, tOrV(_, _, _, v_read.index()), this->tOrO, this->first_pv);
  }
  CUTE_DEVICE void order_barrier_arrive() {
    if (!kTurnEndsWithO) end_turn();
  }
  // kPvBehind: O += P V has been issued after S. is_last: S is of an item's last tile.
  template <bool kPvBehind>
  CUTE_DEVICE void wait_for_s(bool is_last) {
    wait_for_product<kPvBehind>(this->tSrS);
    if (!kPvBehind && in_turn) end_turn();
    release_k();
    if (is_last) this->release_q();
  }
  CUTE_DEVICE void wait_for_o() {
    wait_for_product<0>(this->tOrO);
    if (in_turn) end_turn();
    release_v();
  }

  CUTE_DEVICE void skip_k() {
    order_barrier_wait();
    end_turn();
    __syncwarp();  // no lane may still wait for this phase when the buffer is filled again
    release_k();
  }
  CUTE_DEVICE void skip_v() {
    smem.barriers.v.full[v_read.index()].wait(v_read.phase());
    __syncwarp();
    release_v();
  }

 private:
  // K has arrived, and it is this warpgroup's turn.
  CUTE_DEVICE void order_barrier_wait() {
    in_turn = true;
    smem.barriers.k.full[k_read.index()].wait(k_read.phase());
    if constexpr (kTakesTurns) {
      cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads, NamedBarriers::kOrder + warpgroup);
    }
  }
  CUTE_DEVICE void end_turn() {
    in_turn = false;
    if constexpr (!kTakesTurns) return;
    int next = warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads, NamedBarriers::kOrder + next);
  }
  CUTE_DEVICE void release_k() {
    release(smem.barriers.k.empty[k_read.index()]);
    k_read.advance();
  }
  CUTE_DEVICE void release_v() {
    release(smem.barriers.v.empty[v_read.index()]);
    v_read.advance();
  }
};

// K and V in slices of 128 columns, with the hooks of WholeMma. A slice is released when its
// product is complete. There are no turns: the ring of kernels with two CTAs to an item is shorter
// than a step, so a warpgroup waiting for its turn would keep the other from its slices.

template <class Traits>
struct SlicedMma : Accumulators<Traits> {
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

  CUTE_DEVICE SlicedMma(const HopperSegment& params, SharedStorage<Traits>& smem, int warpgroup,
                        int thread)
      : Base(smem, warpgroup, thread), num_k(slices_of_k<Traits>(params)) {}

  CUTE_DEVICE void issue_qk() {
    const auto tSrQ = this->q();
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
  CUTE_DEVICE static void order_barrier_arrive() {}
  template <bool kPvBehind>
  CUTE_DEVICE void wait_for_s(bool is_last) {
    wait_for_product<kPvBehind ? 2 : 0>(this->tSrS);
    release_k();
    if (is_last) this->release_q();
  }
  CUTE_DEVICE void wait_for_o() {
    wait_for_product<0>(this->tOrO);
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
  CUTE_DEVICE void release_k() {
    if (holds_k) release_slice();
    holds_k = false;
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
