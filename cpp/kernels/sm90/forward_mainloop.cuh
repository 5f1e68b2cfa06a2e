// The consumer main loop. A warpgroup computes S = Q K^T, masks it, applies the online softmax and
// accumulates O += P V over the KV tiles of its work items, the last tile of an item first. The
// tiles of all items form one sequence, so an item's first QK product overlaps with the last PV
// product of the item before it.
//
// Step t computes S(t) and O += P V(t - 1); tile t - 1 belongs to the same item or to the one
// before:
//   1. wait for K(t) and for this warpgroup's place in the order barrier
//   2. issue S = Q K(t)
//   3. wait for V(t - 1), issue O += P V(t - 1)
//   4. arrive at the next warpgroup's order barrier: its products queue up behind these two
//   5. wait for S, release K(t); soft cap and ALiBi (amid 3 where kAmidPv); mask
//   6. wait for O, release V(t - 1); store O if V(t - 1) was its item's last tile
//   7. softmax: compute P from S
// Steps 5 to 7 overlap with the products of the other warpgroups. The transition from one item to
// the next needs more: its LSE and normalizing factors are computed between 4 and 5 of the
// transition's own step, everything else (struct Transition) in an earlier step.
//
// With mask bits a step finds out which tile the next one computes (kept_tiles.cuh). A step whose
// tile has no weight ends before 7, and the next one has no products of V (weightless_tiles.cuh).
//
// A warpgroup skips the tiles that none of its rows touches. After an item whose last tiles it
// skips (as under a window), the item's last O and the next item's first S run by themselves.
//
// Where K and V come in slices (slice_ring.cuh), steps 2 and 3 are made of their products, and
// there are no order barriers (1, 4) and no skipped tiles.
#pragma once

#include "kernels/sm90/consumer_items.cuh"
#include "kernels/sm90/forward_epilogue.cuh"
#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/forward_products.cuh"
#include "kernels/sm90/kept_tiles.cuh"
#include "kernels/sm90/kv_consumer.cuh"
#include "kernels/sm90/load_query.cuh"
#include "kernels/sm90/score_treatment.cuh"
#include "kernels/sm90/speculative_softmax.cuh"
#include "kernels/sm90/weightless_tiles.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ForwardMainloop {
  const ParamsOf<Traits>& params;
  SharedStorage<Traits>& smem;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup
  ForwardProducts<Traits> products;
  SpeculativeSoftmax softmax = {};
  ScoreTreatment<Traits> treatment;  // of the item whose scores come next
  ConsumerPipelineState<Traits::kQStages> q_read = {};
  KvConsumer<Traits> kv;
  ConsumerItems<Traits> items;
  TilesLeftOut<Traits> weightless;
  ItemTimer timer;
  // Where mask bits decide which tiles there are.
  conditional_t<Traits::kHasMaskBits, KeptTileConsumer<Traits>, NoKeptTiles> kept = {};

  __device__ __forceinline__ ForwardMainloop(const ParamsOf<Traits>& params,
                                             SharedStorage<Traits>& smem, int warpgroup, int thread)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        thread(thread),
        products(smem, warpgroup, thread),
        kv(params.segments[0], smem, warpgroup),
        items{smem, warpgroup} {}

  __device__ __forceinline__ void run() {
    kv.order.init();
    Item item = items.wait(0);
    TileMask mask = first_mask(item);
    look_ahead(item);
    while (item.any()) {
      if (item.rests) {
        item = sit_out(item);
        mask = first_mask(item);
        continue;
      }
      Transition transition = prologue(item, mask);
      for (;;) {
        run_steps(item, transition);
        q_read.advance();
        // NOTE: warpgroups that wait in the order barrier for this one may still hold Q, so it goes
        // through the tiles that it skips before it waits for the next Q.
        const Item& next = transition.next;
        if (item.skipped_last > 0 || !next.any() || next.rests) break;
        Transition next_transition = run_transition(item, transition);
        item = transition.next;
        transition = next_transition;
      }
      drain(item, transition);
      item = transition.next;
      mask = transition.next_mask;
    }
  }

 private:
  using Epilogue = ForwardEpilogue<Traits>;
  using Coordinates = ScoreCoordinates<Traits>;
  using TileMask = sm90::TileMask<Traits>;
  using Treatment = ScoreTreatment<Traits>;
  using Item = ConsumerItem<Traits>;

  // What the step from an item to the next one needs. It is computed while the products of an
  // earlier step run: the item's last step, which is a copy of the loop's body, or its first step
  // in kernels where that copy costs more than it gains.
  struct Transition {
    Item next;
    TileMask next_mask;  // of the next item's first tile
    RowTarget target;    // of this item's row
  };

  __device__ __forceinline__ const auto& segment(const Item& item) const {
    return params.segment(item.segment);
  }

  __device__ __forceinline__ void wait_for_q(const Item& item) {
    if constexpr (Traits::kTransforms) {
      query_loader(item).run();
      return;
    }
    smem.barriers.q_full[q_read.index()].wait(q_read.phase());
    order_memory_accesses();
    products.multiply_q(segment(item).logits.q_factor, q_read.index());
  }

  __device__ __forceinline__ void look_ahead(const Item& item) {
    if constexpr (Traits::kHasMaskBits) {
      if (item.any()) kept.look_ahead(smem, [&](int tile) { return coordinates(item, tile); });
    }
  }
  __device__ __forceinline__ void begin_step() {
    if constexpr (Traits::kHasMaskBits) kept.begin_step();
  }
  // While the products run.
  __device__ __forceinline__ void make_mask(const Item& item) {
    if constexpr (Traits::kHasMaskBits) {
      kept.make_mask(coordinates(item, kept.tile.index()), item.own);
      if (!kept.tile.is_last()) look_ahead(item);
    }
  }
  __device__ __forceinline__ int first_tile(const Item& item) const {
    if constexpr (Traits::kHasMaskBits) return kept.tile.index();
    return item.own.end - 1;
  }
  __device__ __forceinline__ bool is_last(const Item& item, int tile) const {
    if constexpr (Traits::kHasMaskBits) return kept.tile.is_last();
    return tile == item.own.begin;
  }
  __device__ __forceinline__ bool prepares_in_first_step(const Item& item) const {
    if constexpr (Traits::kHasMaskBits) return kept.tile.is_last();
    return !Traits::kPreparesInLastStep || item.own.count() == 1;
  }
  __device__ __forceinline__ Transition prepare_transition(const Item& item) {
    Transition transition;
    transition.target = epilogue(item).target_of(warp_row() + lane_id() % kWarpRows);
    transition.next = items.wait(item.next_slot());
    transition.next_mask = first_mask(transition.next);
    if constexpr (Traits::kTransforms) {
      if (transition.next.any()) query_loader(transition.next).prefetch();
    }
    look_ahead(transition.next);
    return transition;
  }

  // Computes the item's first S and P, with no PV product to overlap with.
  __device__ __forceinline__ Transition prologue(const Item& item, const TileMask& mask) {
    timer.start();
    for (int i = 0; i < item.skipped_first; ++i) {
      kv.skip_k();
      kv.skip_v();
    }
    begin_step();
    wait_for_q(item);
    kv.issue_qk(products, products.q(q_read.index()));
    kv.order.arrive();
    start_scores(item);
    make_mask(item);
    Transition transition;
    if (prepares_in_first_step(item)) transition = prepare_transition(item);
    products.template wait_qk<0>();
    finish_first_scores(item, mask);
    make_first_p(item);
    return transition;
  }

  // Runs the steps of the item's other tiles.
  __device__ __forceinline__ void run_steps(const Item& item, Transition& transition) {
    if constexpr (Traits::kHasMaskBits) return run_kept_steps(item, transition);
    Tensor tSrQ = products.q(q_read.index());
    int tile = item.own.end - 2;
    for (; tile >= item.own.begin + Traits::kPreparesInLastStep; --tile) {
      step(tSrQ, item, tile, [] {});
    }
    if (Traits::kPreparesInLastStep && tile >= item.own.begin) {
      step(tSrQ, item, tile, [&] { transition = prepare_transition(item); });
    }
  }
  __device__ __forceinline__ void run_kept_steps(const Item& item, Transition& transition) {
    Tensor tSrQ = products.q(q_read.index());
    while (!kept.tile.is_last()) {
      begin_step();
      step(tSrQ, item, kept.tile.index(), [&] {
        make_mask(item);
        if (kept.tile.is_last()) transition = prepare_transition(item);
      });
    }
  }
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void step(const Q& tSrQ, const Item& item, int tile,
                                       const Meanwhile& meanwhile) {
    // NOTE: no product is in flight where the branches part or meet: wgmma would be serialized. An
    // item's last tile is never left out: the transition to the next item has its P V.
    if (weightless.left_out) {
      multiply_qk(tSrQ, meanwhile);
      finish_scores(item, tile);
      weightless.look_at(products.rows_of_s(), is_last(item, tile), warpgroup);
    } else {
      if constexpr (Treatment::kAmidPv) {
        multiply_and_treat(tSrQ, item);
        meanwhile();
      } else {
        multiply(tSrQ, meanwhile);
      }
      finish_scores(item, tile);
      weightless.look_at(products.rows_of_s(), is_last(item, tile), warpgroup);
      finish_pv();
      products.first_pv = GMMA::ScaleOut::One;
    }
    if (!weightless.left_out) make_p(item, tile);
  }

  // The step from one item to the next: S belongs to the next item, O to the last one. Returns the
  // transition after this one.
  __device__ __forceinline__ Transition run_transition(const Item& last,
                                                       const Transition& transition) {
    const Item& next = transition.next;
    for (int i = 0; i < next.skipped_first; ++i) kv.skip_k();
    begin_step();
    wait_for_q(next);
    typename Epilogue::Prepared ready;
    Transition next_transition;
    multiply(products.q(q_read.index()), [&] {
      ready = prepare_o(last, transition);
      start_scores(next);
      make_mask(next);
      if (prepares_in_first_step(next)) next_transition = prepare_transition(next);
    });
    finish_first_scores(next, transition.next_mask);
    finish_pv();
    for (int i = 0; i < next.skipped_first; ++i) kv.skip_v();
    store_o(last, ready);
    timer.start();
    make_first_p(next);
    return next_transition;
  }

  // Computes the item's last PV product and stores O.
  __device__ __forceinline__ void drain(const Item& item, const Transition& transition) {
    kv.issue_pv(products);
    auto ready = prepare_o(item, transition);
    finish_pv();
    store_o(item, ready);
    for (int i = 0; i < item.skipped_last; ++i) {
      kv.skip_k();
      kv.skip_v();
    }
  }

  // Steps 1 to 4; then calls meanwhile() while the products run, and waits for S.
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void multiply(const Q& tSrQ, const Meanwhile& meanwhile) {
    kv.issue_qk(products, tSrQ);
    kv.issue_pv(products);
    kv.order.arrive();
    meanwhile();
    products.template wait_qk<KvConsumer<Traits>::kProductsOfV>();
  }
  // The same where the tile before has been left out: there is no P V.
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void multiply_qk(const Q& tSrQ, const Meanwhile& meanwhile) {
    kv.issue_qk(products, tSrQ);
    kv.order.arrive();
    kv.skip_v();
    meanwhile();
    products.template wait_qk<0>();
  }
  // The same, with S treated between the steps of P V.
  template <class Q>
  __device__ __forceinline__ void multiply_and_treat(const Q& tSrQ, const Item& item) {
    kv.issue_qk(products, tSrQ);
    kv.wait_for_v();
    auto transform = treatment.issue_pv_amid(products, kv.v_read.index(), segment(item).logits);
    kv.order.arrive();
    // Takes too long to hold the other warpgroups in the order barrier.
    treatment.finish_amid_pv(transform, products.rows_of_s());
  }

  // S is complete: releases K(t), and Q after the item's last tile.
  __device__ __forceinline__ void finish_scores(const Item& item, int tile) {
    accept_scores(item, tile);
    if constexpr (!Treatment::kAmidPv) treatment.apply(products.rows_of_s(), segment(item).logits);
    if constexpr (Traits::kHasMaskBits) {
      if (!kept.tile.is_whole()) kept.mask.apply(products.rows_of_s());
    } else if (item.own.needs_mask(tile)) {
      TileMask::of_bounds(coordinates(item, tile)).apply(products.rows_of_s());
    }
  }
  // Also sets the rows' first references, which does not need O.
  __device__ __forceinline__ void finish_first_scores(const Item& item, const TileMask& mask) {
    int tile = first_tile(item);
    accept_scores(item, tile);
    treatment.apply_to_first(coordinates(item, tile), products.rows_of_s(), segment(item).logits);
    if constexpr (Traits::kHasMaskBits) {
      if (!kept.tile.is_whole()) kept.mask.apply(products.rows_of_s());
    } else if (item.own.needs_mask(tile)) {
      mask.apply(products.rows_of_s());
    }
    weightless.begin(coordinates(item, tile), products.rows_of_s());
    softmax.begin(products.rows_of_s(), treatment.bias.shift(tile));
    products.first_pv = GMMA::ScaleOut::Zero;
  }
  __device__ __forceinline__ void accept_scores(const Item& item, int tile) {
    kv.release_k();
    if (is_last(item, tile)) release(smem.barriers.q_empty[q_read.index()]);
    treatment.factors.apply(products.rows_of_s());
  }

  __device__ __forceinline__ void finish_pv() {
    products.wait_pv();
    kv.release_v();
  }

  __device__ __forceinline__ void make_p(const Item& item, int tile) {
    auto rows_of_o = products.rows_of_o();
    softmax.update(products.rows_of_s(), treatment.bias.shift(tile), products.tOrP, rows_of_o,
                   segment(item).logits.scale_log2, segment(item).max_sum);
  }
  __device__ __forceinline__ void make_first_p(const Item& item) {
    softmax.make_first(products.rows_of_s(), treatment.bias.shift(first_tile(item)), products.tOrP,
                       segment(item).logits.scale_log2);
  }

  __device__ __forceinline__ QueryLoader<Traits> query_loader(const Item& item) const {
    return {segment(item), smem, smem.items[item.slot], warpgroup, thread};
  }

  __device__ __forceinline__ int warp() const { return warpgroup * kWarpgroupWarps + thread / 32; }
  __device__ __forceinline__ int warp_row() const { return warp() * kWarpRows; }

  __device__ __forceinline__ Coordinates coordinates(const Item& item, int tile) const {
    return {segment(item), smem.items[item.slot], warp_row(), tile};
  }
  __device__ __forceinline__ void start_scores(const Item& item) {
    treatment = Treatment::of(coordinates(item, item.own.begin), smem);
  }
  __device__ __forceinline__ TileMask first_mask(const Item& item) const {
    int tile = item.own.end - 1;
    if (Traits::kHasMaskBits || !item.any() || !item.own.needs_mask(tile)) return {};
    return TileMask::of_bounds(coordinates(item, tile));
  }
  __device__ __forceinline__ Epilogue epilogue(const Item& item) const {
    const ItemState& state = smem.items[item.slot];
    return {segment(item), state.item, state.request, state.num_rows};
  }
  __device__ __forceinline__ typename Epilogue::Prepared prepare_o(
      const Item& item, const Transition& transition) const {
    return epilogue(item).prepare(softmax, treatment.bias, coordinates(item, item.own.begin),
                                  transition.target);
  }
  __device__ __forceinline__ void store_o(const Item& item,
                                          const typename Epilogue::Prepared& ready) {
    epilogue(item).store(ready, products.tOrO, smem.o[warp()]);
    // The first warpgroup's rows always exist.
    if (warpgroup == 0 && thread == 0) timer.stop(params, smem.items[item.slot]);
    order_memory_accesses();
    smem.barriers.item_empty[item.slot].arrive();
  }

  // An item that has no rows for this warpgroup: it gives the buffers back, as early as it can.
  // Returns the next item.
  __device__ __forceinline__ Item sit_out(const Item& item) {
    // NOTE: not before Q is there: its buffer may still be counted for the item before.
    smem.barriers.q_full[q_read.index()].wait(q_read.phase());
    __syncwarp();
    release(smem.barriers.q_empty[q_read.index()]);
    q_read.advance();
#pragma unroll 1
    for (int tile = item.own.begin; tile < item.own.end; ++tile) {
      kv.skip_k();
      kv.skip_v();
    }
    order_memory_accesses();
    smem.barriers.item_empty[item.slot].arrive();
    return items.wait(item.next_slot());
  }
};

}  // namespace preflash::sm90
