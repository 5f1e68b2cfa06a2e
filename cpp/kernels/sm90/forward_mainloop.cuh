// A consumer warpgroup: S = Q K^T, mask, online softmax, O += P V over the KV tiles of its items,
// last tile first. The tiles of all items form one sequence, so that an item's first S runs beside
// the last product of the item before it:
//
// step t (S(t) is the next tile's, P V(t - 1) the one before it, of this item or of the last):
//   1. wait K(t), wait for this warpgroup's turn
//   2. issue S = Q K(t)
//   3. wait V(t - 1), issue O += P V(t - 1)
//   4. pass the turn: the other warpgroups' products queue up behind these two
//   5. wait S, release K(t); mask
//   6. wait O, release V(t - 1); store O where V(t - 1) was its item's last
//   7. softmax: P out of S
// Steps 5 to 7 run under the other warpgroups' products. What a step across a border needs besides
// is worked out between 4 and 5 of that step (LSE, factors) and of an earlier one (Border).
//
// A warpgroup whose rows do not touch a tile of the item passes it by; after an item whose last
// tiles it passes by, as under a window, its last O and its next first S stand alone.
#pragma once

#include "kernels/sm90/forward_epilogue.cuh"
#include "kernels/sm90/forward_products.cuh"
#include "kernels/sm90/speculative_softmax.cuh"

namespace preflash::sm90 {

__device__ __forceinline__ void release(Barrier& empty) {
  if (lane_id() == 0) empty.arrive();
}

template <class Traits>
struct ForwardMainloop {
  using Element = typename Traits::Element;

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup
  ForwardProducts<Traits> products;
  SpeculativeSoftmax softmax = {};
  ConsumerRing<Traits::kQStages> q = {};
  ConsumerRing<Traits::kStages> k = {};
  ConsumerRing<Traits::kStages> v = {};
  std::uint32_t item_phase = 0;

  __device__ __forceinline__ ForwardMainloop(const HopperParams& params,
                                             SharedStorage<Traits>& smem, int warpgroup, int thread)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        thread(thread),
        products(smem, warpgroup, thread) {}

  __device__ __forceinline__ void run() {
    begin_turns();
    Item item = read_item(0);
    TileMask mask = first_mask(item);
    while (item.any()) {
      Border border = begin_alone(item, mask);
      for (;;) {
        run_rest(item, border);
        q.advance();
        // The others may wait for this warpgroup's turns before they let go of Q.
        if (item.skipped_last > 0 || !border.next.any()) break;
        Border next_border = run_across(item, border);
        item = border.next;
        border = next_border;
      }
      end_alone(item, border);
      item = border.next;
      mask = border.mask;
    }
  }

 private:
  using Epilogue = ForwardEpilogue<Traits>;

  // A work item as this warpgroup meets it.
  struct Item {
    int slot = 0;  // of smem.items
    TileRange own;
    int skipped_first = 0;  // tiles that none of its rows touches, before its own
    int skipped_last = 0;   // and after; the last tile comes first

    __device__ __forceinline__ bool any() const { return own.count() > 0; }
    __device__ __forceinline__ int next_slot() const {
      return slot + 1 == kItemSlots ? 0 : slot + 1;
    }
  };

  // Which columns of a tile this thread's two rows keep: bit i of a word is its column i of 32 of
  // 128, which is 8 (i / 2) + i % 2 from the tile's first such group on.
  struct TileMask {
    std::uint32_t bits[2][ceil_div(Traits::kTileN, 128)];
  };

  // What the step across an item's end asks for, worked out beside the products of an earlier step:
  // of the item's last one, a copy of the loop's body, or of its first where that copy costs more.
  struct Border {
    Item next;
    TileMask mask;     // of the next item's first tile
    RowTarget target;  // of this item
  };

  // Without tiles: there is no more.
  __device__ __forceinline__ Item read_item(int slot) {
    smem.barriers.item_full[slot].wait(item_phase);
    order_memory_accesses();
    if (slot == kItemSlots - 1) item_phase ^= 1;
    const ItemState& state = smem.items[slot];
    const TileRange& own = state.warpgroup_tiles[warpgroup];
    int begin = warp_uniform(state.tiles.begin);
    int end = warp_uniform(state.tiles.end);
    Item item;
    item.slot = slot;
    if (begin == end) return item;
    item.own = {warp_uniform(own.begin), warp_uniform(own.full_begin), warp_uniform(own.full_end),
                warp_uniform(own.end)};
    if constexpr (Traits::kSkipsTiles) {
      item.skipped_first = end - item.own.end;
      item.skipped_last = item.own.begin - begin;
    }
    return item;
  }

  __device__ __forceinline__ void wait_for_q() {
    smem.barriers.q_full[q.index()].wait(q.phase());
    order_memory_accesses();
    if (params.logits.q_factor != 1.0f) scale_q(q.index());
  }

  __device__ __forceinline__ static bool looks_in_first_step(const Item& item) {
    return !Traits::kLooksInLastStep || item.own.count() == 1;
  }
  __device__ __forceinline__ Border look_across(const Item& item) {
    Border border;
    border.target = epilogue(item).target_of(warp_row() + lane_id() % kWarpRows);
    border.next = read_item(item.next_slot());
    border.mask = first_mask(border.next);
    return border;
  }

  // The item's first P, with no product to run beside it.
  __device__ __forceinline__ Border begin_alone(const Item& item, const TileMask& mask) {
    for (int i = 0; i < item.skipped_first; ++i) {
      skip_k();
      skip_v();
    }
    wait_for_q();
    wait_for_qk();
    products.issue_qk(products.q(q.index()), k.index());
    pass_turn();
    Border border;
    if (looks_in_first_step(item)) border = look_across(item);
    products.template wait_qk<0>();
    finish_first_scores(item, mask);
    make_first_p();
    return border;
  }

  // Steps of all its other tiles.
  __device__ __forceinline__ void run_rest(const Item& item, Border& border) {
    Tensor tSrQ = products.q(q.index());
    int tile = item.own.end - 2;
    for (; tile >= item.own.begin + Traits::kLooksInLastStep; --tile) {
      step(tSrQ, item, tile, [] {});
    }
    if (Traits::kLooksInLastStep && tile >= item.own.begin) {
      step(tSrQ, item, tile, [&] { border = look_across(item); });
    }
  }
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void step(const Q& tSrQ, const Item& item, int tile,
                                       const Meanwhile& meanwhile) {
    multiply(tSrQ, meanwhile);
    finish_scores(item, tile);
    finish_pv();
    products.first_pv = GMMA::ScaleOut::One;
    make_p();
  }

  // The step across a border: S is the next item's, O the last one's. Returns the next border.
  __device__ __forceinline__ Border run_across(const Item& last, const Border& border) {
    const Item& next = border.next;
    for (int i = 0; i < next.skipped_first; ++i) skip_k();
    wait_for_q();
    typename Epilogue::Prepared ready;
    Border next_border;
    multiply(products.q(q.index()), [&] {
      ready = epilogue(last).prepare(softmax, border.target);
      if (looks_in_first_step(next)) next_border = look_across(next);
    });
    finish_first_scores(next, border.mask);
    finish_pv();
    for (int i = 0; i < next.skipped_first; ++i) skip_v();
    store_o(last, ready);
    make_first_p();
    return next_border;
  }

  // The item's last product and its O.
  __device__ __forceinline__ void end_alone(const Item& item, const Border& border) {
    smem.barriers.v_full[v.index()].wait(v.phase());
    products.issue_pv(v.index());
    auto ready = epilogue(item).prepare(softmax, border.target);
    finish_pv();
    store_o(item, ready);
    for (int i = 0; i < item.skipped_last; ++i) {
      skip_k();
      skip_v();
    }
  }

  // Steps 1 to 4, what else can be done beside the products, and S.
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void multiply(const Q& tSrQ, const Meanwhile& meanwhile) {
    wait_for_qk();
    products.issue_qk(tSrQ, k.index());
    smem.barriers.v_full[v.index()].wait(v.phase());
    products.issue_pv(v.index());
    pass_turn();
    meanwhile();
    products.template wait_qk<1>();
  }
  __device__ __forceinline__ void wait_for_qk() const {
    smem.barriers.k_full[k.index()].wait(k.phase());
    wait_turn();
  }

  // S has been computed: K's buffer is free, and Q's after an item's last tile.
  __device__ __forceinline__ void finish_scores(const Item& item, int tile) {
    accept_scores(item, tile);
    if (item.own.needs_mask(tile)) mask_tile(tile_mask(smem.items[item.slot], tile));
  }
  // And the row's first references, for which O need not be there.
  __device__ __forceinline__ void finish_first_scores(const Item& item, const TileMask& mask) {
    int tile = item.own.end - 1;
    accept_scores(item, tile);
    if (item.own.needs_mask(tile)) mask_tile(mask);
    softmax.begin(products.rows_of_s(), params.logits.scale_log2);
    products.first_pv = GMMA::ScaleOut::Zero;
  }
  __device__ __forceinline__ void accept_scores(const Item& item, int tile) {
    release(smem.barriers.k_empty[k.index()]);
    k.advance();
    if (tile == item.own.begin) release(smem.barriers.q_empty[q.index()]);
    transform_logits<Traits::kVariant.logits>(products.tSrS, params.logits);
  }

  __device__ __forceinline__ void finish_pv() {
    products.wait_pv();
    release(smem.barriers.v_empty[v.index()]);
    v.advance();
  }

  __device__ __forceinline__ void make_p() {
    auto rows_of_s = products.rows_of_s();
    auto rows_of_o = products.rows_of_o();
    softmax.update(rows_of_s, products.tOrP, rows_of_o, params.logits.scale_log2);
  }

  __device__ __forceinline__ void make_first_p() {
    auto rows_of_s = products.rows_of_s();
    softmax.make_first(rows_of_s, products.tOrP, params.logits.scale_log2);
  }

  __device__ __forceinline__ int warp() const { return warpgroup * kWarpgroupWarps + thread / 32; }
  __device__ __forceinline__ int warp_row() const { return warp() * kWarpRows; }

  __device__ __forceinline__ Epilogue epilogue(const Item& item) const {
    const ItemState& state = smem.items[item.slot];
    return {params, state.item, state.request, state.num_rows};
  }
  __device__ __forceinline__ void store_o(const Item& item,
                                          const typename Epilogue::Prepared& ready) {
    epilogue(item).store(ready, products.tOrO, smem.o[warp()]);
    order_memory_accesses();
    smem.barriers.item_empty[item.slot].arrive();
  }

  // A tile that other warpgroups work on: its turn and its buffers pass by.
  __device__ __forceinline__ void skip_k() {
    wait_for_qk();
    pass_turn();
    release(smem.barriers.k_empty[k.index()]);
    k.advance();
  }
  __device__ __forceinline__ void skip_v() {
    smem.barriers.v_full[v.index()].wait(v.phase());
    __syncwarp();  // no lane may still wait for this phase when the buffer is filled again
    release(smem.barriers.v_empty[v.index()]);
    v.advance();
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
      Element& q = sQ(warpgroup * kWarpgroupRows + i / Traits::kHeadQk, i % Traits::kHeadQk, stage);
      q = static_cast<Element>(static_cast<float>(q) * params.logits.q_factor);
    }
    order_memory_accesses();
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }

  // The mask's bits of columns before `column`.
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

  __device__ __forceinline__ TileMask tile_mask(const ItemState& state, int tile) const {
    MaskBounds bounds{state.request.qo_len, state.request.kv_len, params.window_left,
                      params.causal};
    ItemTail tail = tail_of(state, tile);
    int first_key = tile * Traits::kTileN;
    TileMask mask;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      int row = state.item.row_begin + warp_row() + lane_id() / 4 + r * 8;
      int token = unpack_row(params, row).token;
      KeySpan kept{bounds.first_key(token) - first_key, bounds.end_key(token) - first_key};
      CUTE_UNROLL
      for (int word = 0; word < ceil_div(Traits::kTileN, 128); ++word) {
        int column = word * 128 + lane_id() % 4 * 2;
        std::uint32_t& bits = mask.bits[r][word];
        bits = columns_in(kept.begin - column, min(kept.end, tail.edge) - column);
        if (tail.shift > 0) {
          bits |= columns_in(max(kept.begin, tail.edge) + tail.shift - column,
                             kept.end + tail.shift - column);
        }
      }
    }
    return mask;
  }
  __device__ __forceinline__ TileMask first_mask(const Item& item) const {
    TileMask mask = {};
    int tile = item.own.end - 1;
    if (item.any() && item.own.needs_mask(tile)) mask = tile_mask(smem.items[item.slot], tile);
    return mask;
  }
  __device__ __forceinline__ void mask_tile(const TileMask& mask) {
    auto scores = products.rows_of_s();
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        if (!(mask.bits[r][c / 32] >> c % 32 & 1u)) scores(r, c) = -INFINITY;
      }
    }
  }
};

}  // namespace preflash::sm90
