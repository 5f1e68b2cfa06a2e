// The hot loop of a consumer warpgroup: S = Q K^T, mask, online softmax, O += P V over the KV tiles
// of one work item, last tile first.
//
// step t (t = end - 2 ... begin; S(end - 1) comes before the loop, O's last product after it):
//   1. wait K(t), wait for this warpgroup's turn
//   2. issue S = Q K(t)
//   3. wait V(t + 1), issue O += P V(t + 1)
//   4. pass the turn: the other warpgroup's products queue up behind these two
//   5. wait S, release K(t); mask; softmax of S, under the other warpgroup's products
//   6. wait O, release V(t + 1); rescale O where a reference moved; P = S in 16 bits
#pragma once

#include "kernels/common/convert.cuh"
#include "kernels/common/online_softmax.cuh"
#include "kernels/sm90/forward_load.cuh"
#include "kernels/sm90/warpgroup_mma.cuh"

namespace preflash::sm90 {

// One consumer warpgroup's ring positions, from item to item.
template <class Traits>
struct ConsumerState {
  RingPosition<kItemSlots> item;
  RingPosition<1> q;
  RingPosition<Traits::kStages> k;
  RingPosition<Traits::kStages> v;
};

template <class Barrier>
__device__ __forceinline__ void release(Barrier& empty) {
  if (lane_id() == 0) empty.arrive();
}

template <class Traits>
struct ForwardMainloop {
  using Element = typename Traits::Element;
  using Softmax = OnlineSoftmax<2>;
  using AccumulatorS = decltype(partition_fragment_C(
      typename Traits::MmaQk{}, Shape<_64, Int<Traits::kTileN>>{}));  // ((2, 2, N / 8), 1, 1)
  using AccumulatorO = decltype(partition_fragment_C(
      typename Traits::MmaPv{}, Shape<_64, Int<Traits::kHeadVo>>{}));  // ((2, 2, D / 8), 1, 1)

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup

  __device__ __forceinline__ void run(const ItemState& state, ConsumerState<Traits>& at,
                                      Softmax& softmax, AccumulatorO& tOrO) const {
    auto& barriers = smem.barriers;
    const TileRange tiles = state.tiles;
    typename Traits::MmaQk mma_qk;
    typename Traits::MmaPv mma_pv;
    Tensor sQ = local_tile(make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{}),
                           Shape<_64, Int<Traits::kHeadQk>>{}, make_coord(warpgroup, 0));
    Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::LayoutK{});  // (n, d, stages)
    Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::LayoutV{});  // (d, n, stages)
    auto thread_qk = mma_qk.get_slice(thread);
    auto thread_pv = mma_pv.get_slice(thread);
    Tensor tSrQ = thread_qk.partition_fragment_A(sQ);  // (MMA, MMA_M, MMA_K)
    Tensor tSrK = thread_qk.partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, stages)
    Tensor tOrV = thread_pv.partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, stages)
    auto rows_of_o = make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));

    barriers.q_full.wait(at.q.phase);
    if (params.logits.q_factor != 1.0f) scale_q();

    AccumulatorS tSrS;
    Tensor rows_of_s = make_tensor(tSrS.data(), as_rows_and_columns(tSrS.layout()));
    barriers.k_full[at.k.index].wait(at.k.phase);
    multiply_async(mma_qk, tSrQ, tSrK(_, _, _, at.k.index), tSrS, GMMA::ScaleOut::Zero);
    wait_for_product<0>(tSrS);
    release(barriers.k_empty[at.k.index]);
    at.k.advance();
    int tile = tiles.end - 1;
    transform_logits<Traits::kVariant.logits>(tSrS, params.logits);
    if (tiles.needs_mask(tile)) mask_tile(rows_of_s, state, tile);
    softmax.move_references(rows_of_s, params.logits.scale_log2);
    softmax.exponentiate(rows_of_s, params.logits.scale_log2);
    auto tOrP = make_tensor<Element>(as_operand_a(tSrS.layout()));  // ((2, 2, 2), 1, N / 16)
    round_to(tOrP, tSrS);

    GMMA::ScaleOut first = GMMA::ScaleOut::Zero;
    for (--tile; tile >= tiles.begin; --tile) {
      barriers.k_full[at.k.index].wait(at.k.phase);
      wait_turn();
      multiply_async(mma_qk, tSrQ, tSrK(_, _, _, at.k.index), tSrS, GMMA::ScaleOut::Zero);
      barriers.v_full[at.v.index].wait(at.v.phase);
      multiply_async(mma_pv, tOrP, tOrV(_, _, _, at.v.index), tOrO, first);
      first = GMMA::ScaleOut::One;
      pass_turn();
      wait_for_product<1>(tSrS);
      release(barriers.k_empty[at.k.index]);
      at.k.advance();
      transform_logits<Traits::kVariant.logits>(tSrS, params.logits);
      if (tiles.needs_mask(tile)) mask_tile(rows_of_s, state, tile);
      auto move = softmax.move_references(rows_of_s, params.logits.scale_log2);
      softmax.rescale_sums(move);
      softmax.exponentiate(rows_of_s, params.logits.scale_log2);
      wait_for_product<0>(tOrO);
      release(barriers.v_empty[at.v.index]);
      at.v.advance();
      softmax.rescale_rows(rows_of_o, move);
      round_to(tOrP, tSrS);
    }
    release(barriers.q_empty);

    barriers.v_full[at.v.index].wait(at.v.phase);
    int below = state.keys.begin - tiles.begin * Traits::kTileN;
    if (below > 0) clear_rows_of_v(at.v.index, below);
    multiply_async(mma_pv, tOrP, tOrV(_, _, _, at.v.index), tOrO, first);
    wait_for_product<0>(tOrO);
    release(barriers.v_empty[at.v.index]);
    at.v.advance();
  }

  // Turns begin with warpgroup 0; the last one hands it the first.
  __device__ __forceinline__ void begin_turns() const {
    if (warpgroup == Traits::kConsumers - 1) pass_turn();
  }

 private:
  __device__ __forceinline__ void wait_turn() const {
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads, NamedBarriers::kTurn + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    int next = warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads, NamedBarriers::kTurn + next);
  }

  template <class P, class S>
  __device__ __forceinline__ static void round_to(P& tOrP, const S& tSrS) {
    Tensor rounded = convert_fragment<Element>(tSrS);
    copy(make_tensor(rounded.data(), tOrP.layout()), tOrP);
  }

  // NOTE: sm_scale <= 0 is served by Q's sign (LogitsParams). Each warpgroup scales its own rows.
  __device__ __forceinline__ void scale_q() const {
    Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{});  // (tile_m, d_qk)
    for (int i = thread; i < kWarpgroupRows * Traits::kHeadQk; i += kWarpgroupThreads) {
      Element& q = sQ(warpgroup * kWarpgroupRows + i / Traits::kHeadQk, i % Traits::kHeadQk);
      q = static_cast<Element>(static_cast<float>(q) * params.logits.q_factor);
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }

  // Rows of V below the window: nobody's by now, and NaN times a zero probability is NaN.
  __device__ __forceinline__ void clear_rows_of_v(int stage, int num_rows) const {
    Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::LayoutV{});  // (d, n, stages)
    for (int i = warpgroup * kWarpgroupThreads + thread; i < num_rows * Traits::kHeadVo;
         i += Traits::kConsumerThreads) {
      sV(i % Traits::kHeadVo, i / Traits::kHeadVo, stage) = Element(0.0f);
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(Traits::kConsumerThreads, NamedBarriers::kAllConsumers);
  }

  template <class Scores>
  __device__ __forceinline__ void mask_tile(Scores& scores, const ItemState& state,
                                            int tile) const {
    MaskBounds bounds{state.request.qo_len, state.request.kv_len, params.window_left,
                      params.causal};
    int first_key = tile * Traits::kTileN + lane_id() % 4 * 2;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      int tile_row = warpgroup * kWarpgroupRows + thread / 32 * kWarpRows + lane_id() / 4 + r * 8;
      int token = unpack_row(params, state.item.row_begin + tile_row).token;
      int first = bounds.first_key(token) - first_key;
      int end = bounds.end_key(token) - first_key;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        int column = c / 2 * 8 + c % 2;
        if (column < first || column >= end) scores(r, c) = -INFINITY;
      }
    }
  }
};

}  // namespace preflash::sm90
