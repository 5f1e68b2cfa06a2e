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
// Steps 5 to 7 run under the other warpgroup's products. Where some warpgroup's rows do not touch a
// tile of the item it passes the tile by, and its S and O meet no product of a neighbouring item.
#pragma once

#include "kernels/sm90/forward_epilogue.cuh"
#include "kernels/sm90/forward_load.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

// Positions in the rings.
template <class Traits>
struct ConsumerState {
  ConsumerRing<Traits::kQStages> q;
  ConsumerRing<Traits::kStages> k;
  ConsumerRing<Traits::kStages> v;
};

template <class Barrier>
__device__ __forceinline__ void release(Barrier& empty) {
  if (lane_id() == 0) empty.arrive();
}

template <class Traits>
struct ForwardMainloop {
  using Element = typename Traits::Element;
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

    SpeculativeSoftmax softmax;
    auto first = GMMA::ScaleOut::Zero;

    // Steps 1 and 2.
    auto multiply_qk = [&](const auto& item_q) {
      barriers.k_full[at.k.index()].wait(at.k.phase());
      wait_turn();
      multiply_async(mma_qk, item_q, tSrK(_, _, _, at.k.index()), tSrS, GMMA::ScaleOut::Zero);
    };
    // Step 3.
    auto multiply_pv = [&] {
      barriers.v_full[at.v.index()].wait(at.v.phase());
      multiply_async(mma_pv, tOrP, tOrV(_, _, _, at.v.index()), tOrO, first);
    };
    auto finish_pv = [&] {
      wait_for_product<0>(tOrO);
      release(barriers.v_empty[at.v.index()]);
      at.v.advance();
    };
    auto make_p = [&] { softmax.update(rows_of_s, tOrP, rows_of_o, scale_log2); };

    begin_turns();
    int slot = 0;
    ItemTiles tiles = begin_item(slot);
    while (tiles.any()) {
      // Nothing to run beside this item's first S.
      for (int i = 0; i < tiles.skipped_first; ++i) {
        skip_k();
        skip_v();
      }
      int tile = tiles.own.end - 1;
      multiply_qk(tSrQ(_, _, _, at.q.index()));
      pass_turn();
      wait_for_product<0>(tSrS);
      finish_scores(rows_of_s, smem.items[slot], tiles.own, tile);
      softmax = {};
      make_p();
      first = GMMA::ScaleOut::Zero;

      ItemTiles last_tiles;
      int last_slot;
      bool begun;
      for (;;) {
        Tensor item_q = tSrQ(_, _, _, at.q.index());
        for (--tile; tile >= tiles.own.begin; --tile) {
          multiply_qk(item_q);
          multiply_pv();
          pass_turn();
          wait_for_product<1>(tSrS);
          finish_scores(rows_of_s, smem.items[slot], tiles.own, tile);
          finish_pv();
          first = GMMA::ScaleOut::One;
          make_p();
        }
        at.q.advance();
        last_tiles = tiles;
        last_slot = slot;
        begun = tiles.skipped_last == 0;
        if (!begun) break;
        slot = next_slot(slot);
        tiles = begin_item(slot);
        if (!tiles.any() || tiles.skipped_first > Traits::kMostSkippedBeside) break;
        // The same step across a border: S is the next item's, O this one's.
        tile = tiles.own.end - 1;
        for (int i = 0; i < tiles.skipped_first; ++i) skip_k();
        multiply_qk(tSrQ(_, _, _, at.q.index()));
        multiply_pv();
        pass_turn();
        wait_for_product<1>(tSrS);
        finish_scores(rows_of_s, smem.items[slot], tiles.own, tile);
        finish_pv();
        for (int i = 0; i < tiles.skipped_first; ++i) skip_v();
        end_item(last_slot, softmax, tOrO);
        softmax = {};
        first = GMMA::ScaleOut::Zero;
        make_p();
      }
      // Nothing to run beside the item's last product.
      multiply_pv();
      finish_pv();
      end_item(last_slot, softmax, tOrO);
      for (int i = 0; i < last_tiles.skipped_last; ++i) {
        skip_k();
        skip_v();
      }
      if (!begun) {
        slot = next_slot(slot);
        tiles = begin_item(slot);
      }
    }
  }

 private:
  // Of one item, for this warpgroup.
  struct ItemTiles {
    TileRange own;
    int skipped_first = 0;  // tiles of the item that none of its rows touches, before its own
    int skipped_last = 0;   // and after; the last tile comes first

    __device__ __forceinline__ bool any() const { return own.count() > 0; }
  };

  __device__ __forceinline__ static int next_slot(int slot) {
    return slot + 1 == kItemSlots ? 0 : slot + 1;
  }

  // The next item's tiles, its Q in place; none: there is no item.
  __device__ __forceinline__ ItemTiles begin_item(int slot) {
    smem.barriers.item_full[slot].wait(item_phase);
    if (slot == kItemSlots - 1) item_phase ^= 1;
    const ItemState& state = smem.items[slot];
    const TileRange& own = state.warpgroup_tiles[warpgroup];
    int begin = warp_uniform(state.tiles.begin);
    int end = warp_uniform(state.tiles.end);
    if (begin == end) return {};
    smem.barriers.q_full[at.q.index()].wait(at.q.phase());
    if (params.logits.q_factor != 1.0f) scale_q(at.q.index());
    ItemTiles tiles;
    tiles.own = {warp_uniform(own.begin), warp_uniform(own.full_begin),
                 warp_uniform(own.full_end), warp_uniform(own.end)};
    if constexpr (Traits::kSkipsTiles) {
      tiles.skipped_first = end - tiles.own.end;
      tiles.skipped_last = tiles.own.begin - begin;
    }
    return tiles;
  }

  // A tile that other warpgroups work on: its turn and its buffers pass by.
  __device__ __forceinline__ void skip_k() {
    smem.barriers.k_full[at.k.index()].wait(at.k.phase());
    wait_turn();
    pass_turn();
    release(smem.barriers.k_empty[at.k.index()]);
    at.k.advance();
  }
  __device__ __forceinline__ void skip_v() {
    smem.barriers.v_full[at.v.index()].wait(at.v.phase());
    release(smem.barriers.v_empty[at.v.index()]);
    at.v.advance();
  }

  __device__ __forceinline__ void end_item(int slot, SpeculativeSoftmax& softmax, AccumulatorO& tOrO) {
    const ItemState& state = smem.items[slot];
    int warp = warpgroup * kWarpgroupWarps + thread / 32;
    ForwardEpilogue<Traits>{params,         state.item,       state.request,
                            state.num_rows, warp * kWarpRows, smem.o[warp]}
        .run(softmax, tOrO);
    __syncwarp();
    release(smem.barriers.item_empty[slot]);
  }

  // S has been computed: K's buffer is free, and Q's after an item's last tile.
  template <class Scores>
  __device__ __forceinline__ void finish_scores(Scores& scores, const ItemState& state,
                                                const TileRange& tiles, int tile) {
    release(smem.barriers.k_empty[at.k.index()]);
    at.k.advance();
    if (tile == tiles.begin) release(smem.barriers.q_empty[at.q.index()]);
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
