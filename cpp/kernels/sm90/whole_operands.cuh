// Q, K and V in whole tiles, as a consumer warpgroup waits for them, multiplies and releases them,
// and its accumulators. SlicedOperands, PairedOperands and EightBitOperands have the same hooks:
//
//   order_barrier_wait()                 K has arrived, and it is this warpgroup's turn
//   issue_qk()                           S = Q K^T
//   issue_pv()                           O (+)= P V, when V has arrived
//   order_barrier_arrive()               the next warpgroup's turn begins
//   wait_for_s(), wait_for_o()           S, O is complete
//   add_up(), prepare_o(), finish_o()    where O is added up in float32
//   exchange_p(), release_p_mailbox()    P is made; nothing reads the other CTA's P any more
//   release_q(), release_k(), release_v()  the operand's buffer may be filled again
//   skip_k(), skip_v()                   of a tile that only other warpgroups compute
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"
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

  CUTE_DEVICE void begin_item(const ItemState&) { first_pv = GMMA::ScaleOut::Zero; }
  // O has a P V that is not an item's last one: the next one adds to it.
  CUTE_DEVICE void add_up(const auto&, const auto&) { first_pv = GMMA::ScaleOut::One; }
  // Hooks at an item's end: its last references are final; all of O is complete.
  CUTE_DEVICE static void prepare_o(const auto&, const auto&) {}
  CUTE_DEVICE static void finish_o() {}
  CUTE_DEVICE static void exchange_p(const auto&, const auto&, bool) {}
  CUTE_DEVICE static void release_p_mailbox() {}
};

template <class Traits>
struct WholeOperands : Accumulators<Traits> {
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
  CUTE_DEVICE WholeOperands(const HopperSegment&, SharedStorage<Traits>& smem, int warpgroup,
                            int thread)
      : Base(smem, warpgroup, thread) {
    if (warpgroup == Traits::kConsumers - 1) end_turn();
  }
  CUTE_DEVICE void order_barrier_wait() {
    in_turn = true;
    smem.barriers.k.full[k_read.index()].wait(k_read.phase());
    if constexpr (kTakesTurns) {
      cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads, NamedBarriers::kOrder + warpgroup);
    }
  }
  CUTE_DEVICE void order_barrier_arrive() {
    if (!kTurnEndsWithO) end_turn();
  }
  CUTE_DEVICE void end_turn() {
    in_turn = false;
    if constexpr (!kTakesTurns) return;
    int next = warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads, NamedBarriers::kOrder + next);
  }

  CUTE_DEVICE void issue_qk(const auto& tSrQ) {
    MmaQk mma;
    Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::LayoutK{});  // (n, d, stages)
    Tensor tSrK = mma.get_slice(thread).partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, stages)
    multiply_async(mma, tSrQ, tSrK(_, _, _, k_read.index()), this->tSrS, GMMA::ScaleOut::Zero);
  }
  CUTE_DEVICE void issue_pv() {
    smem.barriers.v.full[v_read.index()].wait(v_read.phase());
    MmaPv mma;
    Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::LayoutV{});  // (d, n, stages)
    Tensor tOrV = mma.get_slice(thread).partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, stages)
    multiply_async(mma, this->tOrP, tOrV(_, _, _, v_read.index()), this->tOrO, this->first_pv);
  }
  // kPvBehind: O += P V has been issued after S.
  template <bool kPvBehind>
  CUTE_DEVICE void wait_for_s() {
    wait_for_product<kPvBehind>(this->tSrS);
    if (!kPvBehind && in_turn) end_turn();
  }
  CUTE_DEVICE void wait_for_o() {
    wait_for_product<0>(this->tOrO);
    if (in_turn) end_turn();
  }

  CUTE_DEVICE void release_k() {
    release(smem.barriers.k.empty[k_read.index()]);
    k_read.advance();
  }
  CUTE_DEVICE void release_v() {
    release(smem.barriers.v.empty[v_read.index()]);
    v_read.advance();
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
};

}  // namespace preflash::sm90
