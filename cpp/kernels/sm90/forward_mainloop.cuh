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
//   5. wait for S, release K(t); mask
//      (a bias comes earlier where kTreatsAmid: between the steps of 3. It is what 2 adds to where
//      kStartsFromBias)
//   6. wait for O, release V(t - 1)
//   7. softmax: compute P from S, and a soft cap with it where S has no mask
//   8. store O if V(t - 1) was its item's last tile (before 7 unless kMakesPFirst)
// Steps 5 to 8 overlap with the products of the other warpgroups. The transition from one item to
// the next needs more: its LSE and normalizing factors are computed between 4 and 5 of the
// transition's own step, everything else (struct Transition) in an earlier step.
//
// With mask bits a step finds out which tile the next one computes (kept_tiles.cuh). A step whose
// tile has no weight ends before 7, and the next one has no products of V (weightless_tiles.cuh).
// A bias takes the weight of far tiles: from the first one that may have none on, steps of a loop
// of their own find out (run_far_steps).
//
// A warpgroup skips the tiles that none of its rows touches. After an item whose last tiles it
// skips (as under a window), the item's last O and the next item's first S run by themselves.
//
// Where K and V come in slices (slice_ring.cuh), steps 2 and 3 are made of their products, and
// there are no order barriers (1, 4) and no skipped tiles.
//
// NOTE: longer than other files, because whole tiles, slices, tiles that mask bits leave, tiles
// left out for their weight or their distance and items of two segments are one loop: they differ
// in single lines of its steps.
#pragma once

#include "kernels/sm90/capped_tile.cuh"
#include "kernels/sm90/forward_epilogue.cuh"
#include "kernels/sm90/forward_mask.cuh"
#include "kernels/sm90/forward_products.cuh"
#include "kernels/sm90/kept_tiles.cuh"
#include "kernels/sm90/load_query.cuh"
#include "kernels/sm90/rotate_query.cuh"
#include "kernels/sm90/slice_ring.cuh"
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
  ScoreBias<Traits> bias;  // of the item whose scores come next
  ScoreFactors<Traits> factors;
  ConsumerPipelineState<Traits::kQStages> q_read = {};
  ConsumerPipelineState<Traits::kStages> k_read = {};
  ConsumerPipelineState<Traits::kStages> v_read = {};
  SliceReader<Traits> slices;
  std::uint32_t item_phase = 0;
  TilesLeftOut<Traits> weightless;
  FarTilesOf<Traits> far;  // of the item whose scores come next
  // What the last tile needed.
  conditional_t<Traits::kCapsInExponents, CapRange, NoCapRange> cap_range;
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
        slices(params.segments[0], smem) {}

  __device__ __forceinline__ void run() {
    pad_code();
    order_barrier_init();
    Item item = read_item(0);
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

  // Whether a bias is added between the steps of P V. NOTE: a soft cap and factors of heads come
  // first, mask bits take the registers that it needs, and slices of V are products of their own:
  // those kernels treat scores once S is accepted.
  static constexpr bool kTreatsAmid = ScoreBias<Traits>::kAdds && !Traits::kStartsFromBias &&
                                      !Traits::kCaps && !Traits::kHasMaskBits &&
                                      !Traits::kTransforms && !Traits::kSliced;
  // Whether S is treated behind the wait for O. P's registers are free there: a soft cap that waits
  // for S alone spills for want of them.
  static constexpr bool kTreatsAfterPv = Traits::kCaps;
  // The steps of P V that cover the wait for S and all of the bias's work.
  static constexpr int kStepsAhead = Traits::kTileN / 32;

  // A work item as one warpgroup sees it.
  struct Item : ItemOf<Traits::kSegments> {
    int slot = 0;           // of smem.items
    TileRange own;          // the tiles that this warpgroup's rows touch
    int skipped_first = 0;  // tiles before them, in the order of the loop: last tile first
    int skipped_last = 0;   // tiles after them

    __device__ __forceinline__ bool any() const { return own.count() > 0; }
    __device__ __forceinline__ int next_slot() const {
      return slot + 1 == kItemSlots ? 0 : slot + 1;
    }
  };

  // What the step from an item to the next one needs. It is computed while the products of an
  // earlier step run: the item's last step, which is a copy of the loop's body, or its first step
  // in kernels where that copy costs more than it gains.
  struct Transition {
    Item next;
    TileMask next_mask;  // of the next item's first tile
    RowTarget target;    // of this item's row
  };

  __device__ __forceinline__ static void pad_code() {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kPadding; ++i) asm volatile("nanosleep.u32 0;");
  }

  // Waits for the item in `slot`. An item without tiles ends the work list.
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
    if constexpr (Traits::kSegments > 1) {
      item.segment = warp_uniform(state.request.segment);
      item.rests = warp_uniform(state.num_rows) <= warpgroup * kWarpgroupRows;
      if (item.rests) {
        item.own = {begin, begin, end, end};
        return item;
      }
    }
    item.own = {warp_uniform(own.begin), warp_uniform(own.full_begin), warp_uniform(own.full_end),
                warp_uniform(own.end)};
    if constexpr (Traits::kSkipsTiles) {
      item.skipped_first = end - item.own.end;
      item.skipped_last = item.own.begin - begin;
    }
    return item;
  }

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
    if constexpr (Traits::kRotatesQ) rotate_q(item, q_read.index());
    prologue_q(segment(item).logits.q_factor, q_read.index());
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
    transition.next = read_item(item.next_slot());
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
      skip_k();
      skip_v();
    }
    begin_step();
    wait_for_q(item);
    issue_qk(products.q(q_read.index()));
    order_barrier_arrive();
    start_scores(item);
    make_mask(item);
    Transition transition;
    if (prepares_in_first_step(item)) transition = prepare_transition(item);
    products.template wait_qk<0>();
    finish_first_scores(item, mask);
    put_bias_steps();
    make_first_p(item);
    return transition;
  }

  // Runs the steps of the item's other tiles.
  __device__ __forceinline__ void run_steps(const Item& item, Transition& transition) {
    if constexpr (Traits::kHasMaskBits) return run_kept_steps(item, transition);
    if constexpr (Traits::kStartsFromBias) return run_near_and_far_steps(item, transition);
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
  __device__ __forceinline__ void run_near_and_far_steps(const Item& item, Transition& transition) {
    Tensor tSrQ = products.q(q_read.index());
    int last = item.own.begin + Traits::kPreparesInLastStep;
    int tile = item.own.end - 2;
    for (;;) {
      for (; tile >= last && !far.begin_at(tile, last); --tile) step(tSrQ, item, tile, [] {});
      if (tile < last) break;
      tile = run_far_steps(tSrQ, item, tile, transition) - 1;
    }
    if (Traits::kPreparesInLastStep && tile >= item.own.begin) {
      step(tSrQ, item, tile, [&] { transition = prepare_transition(item); });
    }
  }
  // The steps from `tile` on, until one whose tile has weight or is the item's last, which are
  // computed. Returns that tile.
  // NOTE: no product is in flight where the branches part or meet: wgmma would be serialized.
  template <class Q>
  __device__ __forceinline__ int run_far_steps(const Q& tSrQ, const Item& item, int tile,
                                               Transition& transition) {
    const auto prepare_in_last = [&] {
      if (Traits::kPreparesInLastStep && is_last(item, tile)) transition = prepare_transition(item);
    };
    multiply(tSrQ, [] {}, start_products());
    accept_scores(item, tile);
    finish_pv();
    products.first_pv = GMMA::ScaleOut::One;
    while (!is_last(item, tile) && !far_tile_weighs(item, tile)) {
      --tile;
      multiply_qk(tSrQ, prepare_in_last, start_products());
      accept_scores(item, tile);
    }
    far.keep(tile);
    finish_scores(item, tile);
    make_p(item, tile);
    return tile;
  }
  __device__ __forceinline__ bool far_tile_weighs(const Item& item, int tile) {
    return far.weigh(products.rows_of_s(), coordinates(item, tile), bias, softmax, warpgroup);
  }
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void step(const Q& tSrQ, const Item& item, int tile,
                                       const Meanwhile& meanwhile) {
    // NOTE: no product is in flight where the branches part or meet: wgmma would be serialized.
    if (weightless.left_out) {
      multiply_qk(tSrQ, meanwhile);
      accept_scores(item, tile);
      finish_scores(item, tile);
      look_for_weight(item, tile);
    } else {
      if constexpr (kTreatsAmid) {
        multiply_and_treat(tSrQ);
        meanwhile();
        accept_scores(item, tile);
      } else {
        multiply(tSrQ, meanwhile, start_products());
        accept_scores(item, tile);
        if constexpr (kTreatsAfterPv) finish_pv();
      }
      finish_scores(item, tile);
      look_for_weight(item, tile);
      if constexpr (!kTreatsAfterPv) finish_pv();
      products.first_pv = GMMA::ScaleOut::One;
    }
    if (!weightless.left_out) make_p(item, tile);
  }

  // The step from one item to the next: S belongs to the next item, O to the last one. Returns the
  // transition after this one.
  __device__ __forceinline__ Transition run_transition(const Item& last,
                                                       const Transition& transition) {
    const Item& next = transition.next;
    for (int i = 0; i < next.skipped_first; ++i) skip_k();
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
    if constexpr (kTreatsAfterPv) finish_pv();
    finish_first_scores(next, transition.next_mask);
    if constexpr (!kTreatsAfterPv) finish_pv();
    if constexpr (Traits::kMakesPFirst) make_first_p(next);
    for (int i = 0; i < next.skipped_first; ++i) skip_v();
    store_o(last, ready);
    timer.start();
    put_bias_steps();
    if constexpr (!Traits::kMakesPFirst) make_first_p(next);
    return next_transition;
  }

  // Computes the item's last PV product and stores O.
  __device__ __forceinline__ void drain(const Item& item, const Transition& transition) {
    issue_pv();
    auto ready = prepare_o(item, transition);
    finish_pv();
    store_o(item, ready);
    for (int i = 0; i < item.skipped_last; ++i) {
      skip_k();
      skip_v();
    }
  }

  // Steps 1 to 4; then calls meanwhile() while the products run, and waits for S.
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void multiply(const Q& tSrQ, const Meanwhile& meanwhile,
                                           GMMA::ScaleOut old_s = GMMA::ScaleOut::Zero) {
    issue_qk(tSrQ, old_s);
    issue_pv();
    order_barrier_arrive();
    meanwhile();
    products.template wait_qk<Traits::kSliced ? Traits::kSlicesV : 1>();
  }
  // The same where the tile before has been left out: there is no P V.
  template <class Q, class Meanwhile>
  __device__ __forceinline__ void multiply_qk(const Q& tSrQ, const Meanwhile& meanwhile,
                                              GMMA::ScaleOut old_s = GMMA::ScaleOut::Zero) {
    issue_qk(tSrQ, old_s);
    order_barrier_arrive();
    skip_v();
    meanwhile();
    products.template wait_qk<0>();
  }
  // The last slice of K stays until S is complete; so do those of V for O.
  template <class Q>
  __device__ __forceinline__ void issue_qk(const Q& tSrQ,
                                           GMMA::ScaleOut old_s = GMMA::ScaleOut::Zero) {
    if constexpr (Traits::kSliced) {
      products.issue_qk_slice(tSrQ, 0, slices.wait());
#pragma unroll 1
      for (int slice = 1; slice < slices.num_k; ++slice) {
        products.issue_qk_slice(tSrQ, slice, slices.wait());
        warpgroup_wait<1>();
        slices.release_one();
      }
    } else {
      wait_for_qk();
      products.issue_qk(tSrQ, k_read.index(), old_s);
    }
  }
  // What a tile's products of Q and K are added to: biases, which become S, or nothing.
  __device__ __forceinline__ GMMA::ScaleOut start_products() {
    if constexpr (Traits::kStartsFromBias) {
      bias.start(bias_steps(), products.tSrS);
      return GMMA::ScaleOut::One;
    }
    return GMMA::ScaleOut::Zero;
  }
  // Those of the item's other tiles. NOTE: they lie where its O is staged in the end, so O of the
  // item before has been stored.
  __device__ __forceinline__ void put_bias_steps() {
    if constexpr (Traits::kStartsFromBias) {
      bias.put_steps(bias_steps());
      __syncwarp();
    }
  }
  __device__ __forceinline__ auto& bias_steps() const {
    using Steps = typename ScoreBias<Traits>::Steps;
    static_assert(sizeof(Steps) <= sizeof(smem.o[0]));
    return reinterpret_cast<Steps&>(smem.o[warp()]);
  }
  __device__ __forceinline__ void issue_pv() {
    if constexpr (Traits::kSliced) {
      CUTE_UNROLL
      for (int slice = 0; slice < Traits::kSlicesV; ++slice) {
        products.issue_pv_slice(slice, slices.wait());
      }
    } else {
      smem.barriers.v_full[v_read.index()].wait(v_read.phase());
      products.issue_pv(v_read.index());
    }
  }
  __device__ __forceinline__ void release_k() {
    if constexpr (Traits::kSliced) {
      slices.release_one();
    } else {
      release(smem.barriers.k_empty[k_read.index()]);
      k_read.advance();
    }
  }
  __device__ __forceinline__ void release_v() {
    if constexpr (Traits::kSliced) {
      CUTE_UNROLL
      for (int slice = 0; slice < Traits::kSlicesV; ++slice) slices.release_one();
    } else {
      release(smem.barriers.v_empty[v_read.index()]);
      v_read.advance();
    }
  }
  // The same, with the bias of S between the steps of P V. Behind it that would lengthen the loop:
  // a warp that issues P V is held until the tensor core has come to its end.
  template <class Q>
  __device__ __forceinline__ void multiply_and_treat(const Q& tSrQ) {
    wait_for_qk();
    products.issue_qk(tSrQ, k_read.index());
    smem.barriers.v_full[v_read.index()].wait(v_read.phase());
    Tensor rows_of_s = products.rows_of_s();
    products.template issue_pv_amid<kStepsAhead>(
        v_read.index(), [&](ColumnSpan span) { bias.add_to(rows_of_s, span); });
    order_barrier_arrive();
  }
  __device__ __forceinline__ void wait_for_qk() const {
    smem.barriers.k_full[k_read.index()].wait(k_read.phase());
    order_barrier_wait();
  }

  __device__ __forceinline__ void finish_scores(const Item& item, int tile) {
    if (Traits::kCapsInExponents && !is_masked(item, tile)) return;
    if constexpr (!kTreatsAmid) treat_scores(item);
    if (!Traits::kCapsInExponents && !is_masked(item, tile)) return;
    if constexpr (Traits::kHasMaskBits) {
      kept.mask.apply(products.rows_of_s());
    } else {
      TileMask::of_bounds(coordinates(item, tile)).apply(products.rows_of_s());
    }
  }
  __device__ __forceinline__ bool is_masked(const Item& item, int tile) const {
    if constexpr (Traits::kHasMaskBits) return !kept.tile.is_whole();
    return item.own.needs_mask(tile);
  }
  // Also sets the rows' first references, which does not need O.
  __device__ __forceinline__ void finish_first_scores(const Item& item, const TileMask& mask) {
    int tile = first_tile(item);
    accept_scores(item, tile);
    transform_all(item);
    bias.add_to_first(coordinates(item, tile), products.rows_of_s());
    if constexpr (Traits::kHasMaskBits) {
      if (!kept.tile.is_whole()) kept.mask.apply(products.rows_of_s());
    } else if (item.own.needs_mask(tile)) {
      mask.apply(products.rows_of_s());
    }
    weightless.begin(coordinates(item, tile), products.rows_of_s());
    softmax.begin(products.rows_of_s(), bias.shift(tile));
    cap_range = {};
    products.first_pv = GMMA::ScaleOut::Zero;
  }
  // All scores of a tile, where that was not done amid P V.
  __device__ __forceinline__ void treat_scores(const Item& item) {
    transform_all(item);
    Tensor rows_of_s = products.rows_of_s();
    if constexpr (!Traits::kStartsFromBias) bias.add_to(rows_of_s, {0, size<1>(rows_of_s)});
  }
  __device__ __forceinline__ void transform_all(const Item& item) {
    if constexpr (Traits::kCaps) segment(item).cap.cap_all(products.rows_of_s());
  }
  // S is complete: releases K(t), and Q after the item's last tile.
  __device__ __forceinline__ void accept_scores(const Item& item, int tile) {
    release_k();
    if (is_last(item, tile)) release(smem.barriers.q_empty[q_read.index()]);
    factors.apply(products.rows_of_s());
  }

  // An item's last tile is computed: the transition to the next item has its P V.
  __device__ __forceinline__ void look_for_weight(const Item& item, int tile) {
    weightless.look_at(products.rows_of_s(), is_last(item, tile), warpgroup);
  }

  __device__ __forceinline__ void finish_pv() {
    products.wait_pv();
    release_v();
  }

  __device__ __forceinline__ void make_p(const Item& item, int tile) {
    auto rows_of_o = products.rows_of_o();
    if constexpr (Traits::kCapsInExponents) {
      // NOTE: kept from the step's other question it would take a register of d64 through the loop.
      asm volatile("" : "+r"(tile));
      if (!is_masked(item, tile)) {
        auto rows_of_s = products.rows_of_s();
        CappedTile<Traits, decltype(rows_of_s)> capped{rows_of_s, coordinates(item, tile),
                                                       segment(item).cap, cap_range};
        softmax.update(capped, products.tOrP, rows_of_o, segment(item).logits.scale_log2,
                       segment(item).max_sum);
        return;
      }
    }
    softmax.update(products.rows_of_s(), bias.shift(tile), products.tOrP, rows_of_o,
                   segment(item).logits.scale_log2, segment(item).max_sum);
  }
  __device__ __forceinline__ void make_first_p(const Item& item) {
    softmax.make_first(products.rows_of_s(), bias.shift(first_tile(item)), products.tOrP,
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
    Coordinates of_item = coordinates(item, item.own.begin);
    bias = ScoreBias<Traits>::of(of_item);
    factors = ScoreFactors<Traits>::of(of_item, smem);
    if constexpr (Traits::kStartsFromBias) {
      far = FarTiles<Traits>::of(of_item, bias, warpgroup * kWarpgroupRows, item.own.end);
    }
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
    return epilogue(item).prepare(softmax, bias, coordinates(item, item.own.begin),
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
      skip_k();
      skip_v();
    }
    order_memory_accesses();
    smem.barriers.item_empty[item.slot].arrive();
    return read_item(item.next_slot());
  }

  // A skipped tile belongs to other warpgroups: this one only passes the order barrier and releases
  // the buffers.
  __device__ __forceinline__ void skip_k() {
    wait_for_qk();
    order_barrier_arrive();
    release(smem.barriers.k_empty[k_read.index()]);
    k_read.advance();
  }
  __device__ __forceinline__ void skip_v() {
    smem.barriers.v_full[v_read.index()].wait(v_read.phase());
    __syncwarp();  // no lane may still wait for this phase when the buffer is filled again
    release(smem.barriers.v_empty[v_read.index()]);
    v_read.advance();
  }

  // The order barrier lets one warpgroup at a time issue its products: 0, 1, ... and 0 again. At
  // the start the last warpgroup arrives for warpgroup 0. Where tiles arrive in slices, the
  // warpgroups use each slice at about the same time, without an order.
  __device__ __forceinline__ void order_barrier_init() const {
    if (warpgroup == Traits::kConsumers - 1) order_barrier_arrive();
  }
  __device__ __forceinline__ void order_barrier_wait() const {
    if constexpr (Traits::kSliced) return;
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroupThreads, NamedBarriers::kOrder + warpgroup);
  }
  __device__ __forceinline__ void order_barrier_arrive() const {
    if constexpr (Traits::kSliced) return;
    int next = warpgroup + 1 == Traits::kConsumers ? 0 : warpgroup + 1;
    cutlass::arch::NamedBarrier::arrive(2 * kWarpgroupThreads, NamedBarriers::kOrder + next);
  }

  // What Q needs between its arrival and its products. Each warpgroup treats its rows, in place.
  __device__ __forceinline__ void rotate_q(const Item& item, int stage) const {
    QueryRotator<Traits>{segment(item), smem, smem.items[item.slot], warpgroup, thread}.run(stage);
    announce_q();
  }
  __device__ __forceinline__ void prologue_q(const float& factor, int stage) const {
    // NOTE: sm_scale <= 0 is applied through Q's sign (LogitsParams).
    if (factor == 1.0f) return;
    using Element = typename Traits::ElementQ;
    Tensor sQ = make_tensor(make_smem_ptr(smem.q), typename Traits::LayoutQ{});
    for (int i = thread; i < kWarpgroupRows * Traits::kHeadQk; i += kWarpgroupThreads) {
      Element& q = sQ(warpgroup * kWarpgroupRows + i / Traits::kHeadQk, i % Traits::kHeadQk, stage);
      q = static_cast<Element>(static_cast<float>(q) * factor);
    }
    announce_q();
  }
  // To the products of the warpgroup, and to whoever of it treats it next.
  __device__ __forceinline__ void announce_q() const {
    order_memory_accesses();
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(kWarpgroupThreads, NamedBarriers::kWarpgroup + warpgroup);
  }
};

}  // namespace preflash::sm90
