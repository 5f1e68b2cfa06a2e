// A consumer warpgroup: S = Q K^T, mask, online softmax, O += P V over the KV tiles of its items,
// last tile first. The tiles of all items form one sequence, so that an item's first S runs beside
// the last product of the item before it:
//
// step t (S(t) is the next tile's, P V(t - 1) the one before it, of this item or of the last):
//   1. wait K(t), wait for this warpgroup's turn
//   2. issue S = Q K(t)
//   3. wait V(t - 1), issue O += P V(t - 1)
//   4. pass the turn: the other warpgroup's products queue up behind these two
//   5. wait S, release K(t); mask; maxima
//   6. wait O, release V(t - 1); store O where V(t - 1) was its item's last, else rescale it where
//      a reference moved
//   7. P = 2^S in 16 bits
// Steps 5 to 7 run under the other warpgroup's products.
#pragma once

#include "kernels/sm90/forward_epilogue.cuh"
#include "kernels/sm90/forward_load.cuh"

namespace preflash::sm90 {

// Positions in the rings.
template <class Traits>
struct ConsumerState {
  RingPosition<Traits::kQStages> q;
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
  ConsumerState<Traits> at = {};
  std::uint32_t item_phase = 0;

  __device__ __forceinline__ void run() {
    auto& barriers = smem.barriers;
    const float scale_log2 = params.logits.scale_log2;
    typename Traits::MmaQk mma_qk;
    typename Traits::MmaPv mma_pv;
    Tensor sQ =
        local_tile(make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{}),
                   Shape<_64, Int<Traits::kHeadQk>, Int<Traits::kQStages>>{},
                   make_coord(warpgroup, 0, 0));  // (64, d, q stages)
    Tensor sK = make_tensor(make_smem_ptr(smem.k), typename Traits::LayoutK{});  // (n, d, stages)
    Tensor sV = make_tensor(make_smem_ptr(smem.v), typename Traits::LayoutV{});  // (d, n, stages)
    auto thread_qk = mma_qk.get_slice(thread);
    auto thread_pv = mma_pv.get_slice(thread);
    Tensor tSrQ = thread_qk.partition_fragment_A(sQ);  // (MMA, MMA_M, MMA_K, q stages)
    Tensor tSrK = thread_qk.partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, stages)
    Tensor tOrV = thread_pv.partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, stages)
    AccumulatorS tSrS;
    AccumulatorO tOrO;
    Tensor rows_of_s = make_tensor(tSrS.data(), as_rows_and_columns(tSrS.layout()));
    Tensor rows_of_o = make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));
    auto tOrP = make_tensor<Element>(as_operand_a(tSrS.layout()));  // ((2, 2, 2), 1, N / 16)

    begin_turns();
    int slot = 0;
    TileRange tiles = begin_item(slot);
    if (tiles.count() == 0) return;
    int tile = tiles.end - 1;
    Softmax softmax;
    barriers.k_full[at.k.index].wait(at.k.phase);
    multiply_async(mma_qk, tSrQ(_, _, _, at.q.index), tSrK(_, _, _, at.k.index), tSrS,
                   GMMA::ScaleOut::Zero);
    wait_for_product<0>(tSrS);
    finish_scores(rows_of_s, smem.items[slot], tiles, tile);
    softmax.move_references(rows_of_s, scale_log2);
    softmax.exponentiate(rows_of_s, scale_log2);
    round_to(tSrS, tOrP);

    // Steps 1 to 4, and S waited for.
    auto first = GMMA::ScaleOut::Zero;
    auto multiply = [&](const auto& tSrQ) {
      barriers.k_full[at.k.index].wait(at.k.phase);
      wait_turn();
      multiply_async(mma_qk, tSrQ, tSrK(_, _, _, at.k.index), tSrS, GMMA::ScaleOut::Zero);
      barriers.v_full[at.v.index].wait(at.v.phase);
      multiply_async(mma_pv, tOrP, tOrV(_, _, _, at.v.index), tOrO, first);
      pass_turn();
      wait_for_product<1>(tSrS);
    };
    auto finish_product = [&] {
      wait_for_product<0>(tOrO);
      release(barriers.v_empty[at.v.index]);
      at.v.advance();
    };
    for (;;) {
      Tensor item_q = tSrQ(_, _, _, at.q.index);
      for (--tile; tile >= tiles.begin; --tile) {
        multiply(item_q);
        finish_scores(rows_of_s, smem.items[slot], tiles, tile);
        auto move = softmax.move_references(rows_of_s, scale_log2);
        finish_product();
        softmax.rescale(rows_of_o, move);
        first = GMMA::ScaleOut::One;
        softmax.exponentiate(rows_of_s, scale_log2);
        round_to(tSrS, tOrP);
      }
      at.q.advance();
      // The same step across a border: S is the next item's, O this one's.
      const int last_slot = slot;
      slot = slot + 1 == kItemSlots ? 0 : slot + 1;
      tiles = begin_item(slot);
      if (tiles.count() == 0) {
        slot = last_slot;
        break;
      }
      tile = tiles.end - 1;
      multiply(tSrQ(_, _, _, at.q.index));
      finish_scores(rows_of_s, smem.items[slot], tiles, tile);
      Softmax finished = softmax;
      softmax = Softmax();
      softmax.move_references(rows_of_s, scale_log2);
      finish_product();
      end_item(last_slot, finished, tOrO);
      first = GMMA::ScaleOut::Zero;
      softmax.exponentiate(rows_of_s, scale_log2);
      round_to(tSrS, tOrP);
    }

    barriers.v_full[at.v.index].wait(at.v.phase);
    multiply_async(mma_pv, tOrP, tOrV(_, _, _, at.v.index), tOrO, first);
    wait_for_product<0>(tOrO);
    end_item(slot, softmax, tOrO);
  }

 private:
  // The tiles of the next item, its Q in place; none: there is no item.
  __device__ __forceinline__ TileRange begin_item(int slot) {
    smem.barriers.item_full[slot].wait(item_phase);
    if (slot == kItemSlots - 1) item_phase ^= 1;
    const TileRange& state = smem.items[slot].tiles;
    TileRange tiles{warp_uniform(state.begin), warp_uniform(state.full_begin),
                    warp_uniform(state.full_end), warp_uniform(state.end)};
    if (tiles.count() > 0) {
      smem.barriers.q_full[at.q.index].wait(at.q.phase);
      if (params.logits.q_factor != 1.0f) scale_q(at.q.index);
    }
    return tiles;
  }

  __device__ __forceinline__ void end_item(int slot, Softmax& softmax, AccumulatorO& tOrO) {
    epilogue(slot).run(softmax, tOrO);
    __syncwarp();
    release(smem.barriers.item_empty[slot]);
  }

  __device__ __forceinline__ ForwardEpilogue<Traits> epilogue(int slot) const {
    int warp = warpgroup * kWarpgroupWarps + thread / 32;
    return {params, smem.items[slot], smem.o[warp], warp * kWarpRows};
  }

  // S has been computed: K's buffer is free, and Q's after an item's last tile.
  template <class Scores>
  __device__ __forceinline__ void finish_scores(Scores& scores, const ItemState& state,
                                                const TileRange& tiles, int tile) {
    release(smem.barriers.k_empty[at.k.index]);
    at.k.advance();
    if (tile == tiles.begin) release(smem.barriers.q_empty[at.q.index]);
    transform_logits<Traits::kVariant.logits>(scores, params.logits);
    if (tiles.needs_mask(tile)) mask_tile(scores, state, tile);
  }

  // Turns begin with warpgroup 0; the last one hands it the first.
  __device__ __forceinline__ void begin_turns() const {
    if (warpgroup == Traits::kConsumers - 1) pass_turn();
  }
  __device__ __forceinline__ void wait_turn() const {
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads, NamedBarriers::kTurn + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    int next = warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads, NamedBarriers::kTurn + next);
  }

  // NOTE: sm_scale <= 0 is served by Q's sign (LogitsParams). Each warpgroup scales its own rows.
  __device__ __forceinline__ void scale_q(int stage) const {
    Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{});
    for (int i = thread; i < kWarpgroupRows * Traits::kHeadQk; i += kWarpgroupThreads) {
      Element& q =
          sQ(warpgroup * kWarpgroupRows + i / Traits::kHeadQk, i % Traits::kHeadQk, stage);
      q = static_cast<Element>(static_cast<float>(q) * params.logits.q_factor);
    }
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }

  // Bit i of a row's mask is this thread's column i of 32: 8 (i / 2) + i % 2, from the tile's first
  // such group on. The bits of columns before `column`:
  __device__ __forceinline__ static std::uint32_t columns_before(int column) {
    int count = min(max(column / 8 * 2 + min(column % 8, 2), 0), 32);
    return count == 0 ? 0u : 0xffffffffu >> (32 - count);
  }
  __device__ __forceinline__ static std::uint32_t columns_in(int begin, int end) {
    return columns_before(max(end, 0)) & ~columns_before(max(begin, 0));
  }

  // Where the columns of the tile with the request's last key lie: those from `edge` on are
  // `shift` further right (tensor_map.h).
  struct ItemTail {
    int edge;
    int shift;
  };
  __device__ __forceinline__ ItemTail tail_of(const ItemState& state, int tile) const {
    int box_rows = params.box.kv_rows;
    int last = state.request.kv_len - tile * Traits::kTileN;
    if (box_rows == 0 || last >= Traits::kTileN) return {Traits::kTileN, 0};
    int in_box = last % box_rows;
    return {last - in_box, in_box == 0 ? 0 : box_rows - in_box};
  }

  template <class Scores>
  __device__ __forceinline__ void mask_tile(Scores& scores, const ItemState& state,
                                            int tile) const {
    MaskBounds bounds{state.request.qo_len, state.request.kv_len, params.window_left,
                      params.causal};
    ItemTail tail = tail_of(state, tile);
    int first_key = tile * Traits::kTileN;
    int lane_column = lane_id() % 4 * 2;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      int tile_row = warpgroup * kWarpgroupRows + thread / 32 * kWarpRows + lane_id() / 4 + r * 8;
      int token = unpack_row(params, state.item.row_begin + tile_row).token;
      KeySpan kept{bounds.first_key(token) - first_key, bounds.end_key(token) - first_key};
      CUTE_UNROLL
      for (int word = 0; word < ceil_div(Traits::kTileN, 128); ++word) {
        int column = word * 128 + lane_column;
        std::uint32_t bits = columns_in(kept.begin - column, min(kept.end, tail.edge) - column) |
                             columns_in(max(kept.begin, tail.edge) + tail.shift - column,
                                        kept.end + tail.shift - column);
        CUTE_UNROLL
        for (int i = 0; i < 32 && word * 32 + i < size<1>(scores); ++i) {
          if (!(bits >> i & 1u)) scores(r, word * 32 + i) = -INFINITY;
        }
      }
    }
  }
};

}  // namespace preflash::sm90
