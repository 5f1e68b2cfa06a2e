// The consumer main loop. A warpgroup computes S = Q K^T, finishes its scores, applies the online
// softmax and accumulates O += P V over the KV tiles of its work items, the last tile of an item
// first. The tiles of all items form one sequence, so an item's first QK product overlaps with the
// last PV product of the item before it. step() is the schedule; the rest is how items begin, meet
// and end.
//
// Kernels differ in policies: operands (whole_operands.cuh, sliced_operands.cuh,
// eight_bit_operands.cuh), how Q arrives (load_query.cuh), which tiles there are
// (consumer_tiles.cuh), what is done to scores (scores.cuh), which tiles are skipped
// (skipped_tiles.cuh).
//
// A warpgroup skips the tiles that none of its rows touches. After an item whose last tiles it
// skips (as under a window), the item's last O and the next item's first S run by themselves.
#pragma once

#include "kernels/sm90/capped_softmax.cuh"
#include "kernels/sm90/consumer_tiles.cuh"
#include "kernels/sm90/eight_bit_operands.cuh"
#include "kernels/sm90/forward_epilogue.cuh"
#include "kernels/sm90/load_query.cuh"
#include "kernels/sm90/scores.cuh"
#include "kernels/sm90/skipped_tiles.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ForwardMainloop {
  const ParamsOf<Traits>& params;
  SharedStorage<Traits>& smem;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup
  OperandsOf<Traits> operands;
  TilesOf<Traits> tiles;  // of the item whose scores come next, as are its scores
  Scores<Traits> scores;
  SoftmaxOf<Traits> softmax = {};
  SkippedTiles<Traits> skipped;
  std::uint32_t item_phase = 0;
  ItemTimer timer;

  CUTE_DEVICE ForwardMainloop(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem,
                              int warpgroup, int thread)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        thread(thread),
        operands(params.segments[0], smem, warpgroup, thread) {}

  CUTE_DEVICE void run() {
    Item item = read_item(0);
    FirstTile first = tiles.look_ahead(item, at(item));
    while (item.any()) {
      if (item.idle) {
        item = stay_idle(item);
        first = tiles.look_ahead(item, at(item));
        continue;
      }
      Transition transition = begin(item, first);
      for (;;) {
        run_steps(item, transition);
        operands.q_read.advance();
        // NOTE: warpgroups whose turn is later may still hold Q, so this warpgroup passes the tiles
        // that it skips before it waits for the next Q.
        const Item& next = transition.next;
        if (item.skipped_last > 0 || !next.any() || next.idle) break;
        Transition next_transition = next_item_step(item, transition);
        item = transition.next;
        transition = next_transition;
      }
      end(item, transition);
      item = transition.next;
      first = transition.next_first;
    }
  }

 private:
  using Epilogue = ForwardEpilogue<Traits>;
  using Coordinates = ScoreCoordinates<Traits>;
  using FirstTile = typename TilesOf<Traits>::First;

  // A work item as one warpgroup sees it.
  struct Item : ItemOf<Traits::kSegments> {
    int slot = 0;           // of smem.items
    TileRange own;          // the tiles that this warpgroup's rows touch
    int skipped_first = 0;  // tiles before them, in the order of the loop: last tile first
    int skipped_last = 0;   // tiles after them

    CUTE_DEVICE bool any() const { return own.count() > 0; }
  };

  // State for the step from an item to the next. An earlier step prepares it while products run:
  // the item's last step, which is a copy of the loop's body, or, in kernels where that copy costs
  // more than it gains, its first step.
  struct Transition {
    Item next;
    FirstTile next_first;
    RowTarget target;  // of this item's row
  };

  // The coordinates of an item's tiles.
  struct CoordinatesOf {
    const ForwardMainloop& loop;
    const Item& item;

    CUTE_DEVICE Coordinates operator()(int tile) const {
      return {loop.segment(item), loop.smem.items[item.slot], loop.warp() * kWarpRows,
              own_tile<Traits>(tile)};
    }
    CUTE_DEVICE SharedStorage<Traits>& smem() const { return loop.smem; }
  };
  CUTE_DEVICE CoordinatesOf at(const Item& item) const { return {*this, item}; }

  // S(t) and O += P V(t - 1) of one item: t is `tile`, t - 1 the tile computed before. Between two
  // turns of this warpgroup the other warpgroups' products run. meanwhile() prepares the item's
  // end.
  CUTE_DEVICE void step(const auto& tSrQ, const Item& item, int tile, const auto& meanwhile) {
    // NOTE: no product is in flight where the branches part or meet: wgmma would be serialized.
    if (skipped.this_tile()) {
      scores_without_pv(tSrQ, item, tile, meanwhile);
    } else {
      operands.order_barrier_wait();  // K(t) has arrived, and it is this warpgroup's turn
      operands.issue_qk(tSrQ);
      scores.bias.issue(smem, operands.tSrS);
      operands.issue_pv();  // V(t - 1) has arrived
      operands.release_p_mailbox();
      operands.order_barrier_arrive();
      meanwhile();
      operands.template wait_for_s<true>();
      finish_scores(item, tile);
      softmax.before_o(operands.rows_of_s(), scores.bias.shift(tile), segment(item));
      operands.wait_for_o();
      operands.release_v();
      softmax.after_o(operands.rows_of_o());
      operands.add_up(softmax, segment(item));
    }
    if (!skipped.this_tile()) exponentiate(item, tile);
  }
  // Tile t - 1 was skipped: there is no P V.
  CUTE_DEVICE void scores_without_pv(const auto& tSrQ, const Item& item, int tile,
                                     const auto& meanwhile) {
    operands.order_barrier_wait();
    operands.issue_qk(tSrQ);
    scores.bias.issue(smem, operands.tSrS);
    operands.order_barrier_arrive();
    operands.skip_v();
    meanwhile();
    operands.template wait_for_s<false>();
    finish_scores(item, tile);
  }
  // The steps of an item after its first one.
  CUTE_DEVICE void run_steps(const Item& item, Transition& transition) {
    Tensor tSrQ = operands.q();
    tiles.for_others(
        item, at(item),
        [&](int tile, const auto& meanwhile)
            __attribute__((always_inline)) { step(tSrQ, item, tile, meanwhile); },
        [&] { transition = prepare_transition(item); });
  }

  // An item's first S and P, if no item came right before.
  CUTE_DEVICE Transition begin(const Item& item, const FirstTile& first) {
    timer.start();
    for (int i = 0; i < item.skipped_first; ++i) {
      operands.skip_k();
      operands.skip_v();
    }
    tiles.begin_step();
    query(item).arrive(operands.q_read);
    operands.order_barrier_wait();
    operands.issue_qk(operands.q());
    operands.order_barrier_arrive();
    scores = Scores<Traits>::of(at(item)(item.own.begin), smem);
    tiles.meanwhile(item, at(item));
    Transition transition;
    if (tiles.prepares_in_first_step(item)) transition = prepare_transition(item);
    operands.template wait_for_s<false>();
    finish_first_scores(item, first);
    exponentiate_first(item);
    return transition;
  }

  // Steps from one item to the next: S belongs to `next`, O to `last`, whose LSE and factors are
  // computed while the products run. Returns the transition after this one.
  CUTE_DEVICE Transition next_item_step(const Item& last, const Transition& transition) {
    const Item& next = transition.next;
    for (int i = 0; i < next.skipped_first; ++i) operands.skip_k();
    tiles.begin_step();
    query(next).arrive(operands.q_read);
    operands.order_barrier_wait();
    operands.issue_qk(operands.q());
    operands.issue_pv();
    operands.order_barrier_arrive();
    typename Epilogue::Prepared ready = prepare_o(last, transition);
    scores = Scores<Traits>::of(at(next)(next.own.begin), smem);
    tiles.meanwhile(next, at(next));
    Transition next_transition;
    if (tiles.prepares_in_first_step(next)) next_transition = prepare_transition(next);
    operands.template wait_for_s<true>();
    finish_first_scores(next, transition.next_first);
    operands.wait_for_o();
    operands.release_v();
    if constexpr (Traits::kSoftmaxBeforeStore) exponentiate_first(next);
    for (int i = 0; i < next.skipped_first; ++i) operands.skip_v();
    store_o(last, ready);
    timer.start();
    if constexpr (!Traits::kSoftmaxBeforeStore) exponentiate_first(next);
    return next_transition;
  }

  // Computes an item's last PV product and stores its O, if no item directly follows.
  CUTE_DEVICE void end(const Item& item, const Transition& transition) {
    operands.issue_pv();
    auto ready = prepare_o(item, transition);
    operands.wait_for_o();
    operands.release_v();
    store_o(item, ready);
    for (int i = 0; i < item.skipped_last; ++i) {
      operands.skip_k();
      operands.skip_v();
    }
  }

  // An item in which this warpgroup has no rows: releases the buffers as early as possible, and
  // returns the next item.
  CUTE_DEVICE Item stay_idle(const Item& item) {
    // NOTE: Q must have arrived: until then its buffer may still count for the item before.
    smem.barriers.q.full[operands.q_read.index()].wait(operands.q_read.phase());
    __syncwarp();
    operands.release_q();
    operands.q_read.advance();
#pragma unroll 1
    for (int tile = item.own.begin; tile < item.own.end; ++tile) {
      operands.skip_k();
      operands.skip_v();
    }
    release_item(item);
    return read_item(next_slot(item));
  }

  CUTE_DEVICE Transition prepare_transition(const Item& item) {
    Transition transition;
    transition.target = epilogue(item).target_of(warp() * kWarpRows + lane_id() % kWarpRows);
    transition.next = read_item(next_slot(item));
    transition.next_first = tiles.look_ahead(transition.next, at(transition.next));
    return transition;
  }

  // S is complete: K(t) is free, and Q after the item's last tile.
  CUTE_DEVICE void release_k(const Item& item, int tile) {
    operands.release_k();
    if (tiles.is_last(item, tile)) operands.release_q();
  }
  CUTE_DEVICE void finish_scores(const Item& item, int tile) {
    release_k(item, tile);
    scores.finish(segment(item), operands.rows_of_s());
    if constexpr (!softmax.kMasks) tiles.mask(item, tile, at(item), operands.rows_of_s());
    // An item's last tile is never skipped: the transition to the next item contains its P V.
    skipped.look_at(operands.rows_of_s(), tiles.is_last(item, tile), warpgroup);
  }
  // Also sets the rows' first references, which does not need O.
  CUTE_DEVICE void finish_first_scores(const Item& item, const FirstTile& first) {
    int tile = tiles.first(item);
    Coordinates coordinates = at(item)(tile);
    release_k(item, tile);
    scores.finish_first(segment(item), coordinates, operands.rows_of_s());
    tiles.mask_first(item, first, operands.rows_of_s());
    skipped.begin(coordinates, operands.rows_of_s());
    softmax.begin(operands.rows_of_s(), scores.bias.shift(tile), segment(item));
    operands.first_pv = GMMA::ScaleOut::Zero;
  }

  CUTE_DEVICE void exponentiate(const Item& item, int tile) {
    auto rows_of_o = operands.rows_of_o();
    auto mask = [&] { return tiles.mask(item, tile, at(item), operands.rows_of_s()); };
    softmax.update(operands.rows_of_s(), scores.bias.shift(tile), operands.tOrP, rows_of_o,
                   segment(item), mask);
    operands.exchange_p(softmax, segment(item), tiles.is_last(item, tile));
  }
  CUTE_DEVICE void exponentiate_first(const Item& item) {
    const int tile = tiles.first(item);
    softmax.make_first(operands.rows_of_s(), scores.bias.shift(tile), operands.tOrP, segment(item));
    operands.exchange_p(softmax, segment(item), tiles.is_last(item, tile));
  }

  CUTE_DEVICE typename Epilogue::Prepared prepare_o(const Item& item,
                                                    const Transition& transition) {
    operands.prepare_o(softmax, segment(item));
    return epilogue(item).prepare(softmax, scores.bias, at(item)(item.own.begin),
                                  transition.target);
  }
  CUTE_DEVICE void store_o(const Item& item, const typename Epilogue::Prepared& ready) {
    operands.finish_o();
    epilogue(item).store(ready, operands.tOrO, smem.o[warp()]);
    operands.release_p_mailbox();
    // The first warpgroup's rows always exist.
    if (warpgroup == 0 && thread == 0) timer.stop(params, smem.items[item.slot]);
    release_item(item);
  }

  CUTE_DEVICE static int next_slot(const Item& item) {
    return item.slot + 1 == kItemSlots ? 0 : item.slot + 1;
  }
  // Waits for the item in `slot`. An item without tiles ends the work list.
  CUTE_DEVICE Item read_item(int slot) {
    smem.barriers.item.full[slot].wait(item_phase);
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
      item.idle = warp_uniform(state.num_rows) <= warpgroup * kWarpgroupRows;
      if (item.idle) {
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
  CUTE_DEVICE void release_item(const Item& item) {
    order_memory_accesses();
    smem.barriers.item.empty[item.slot].arrive();
  }

  CUTE_DEVICE const auto& segment(const Item& item) const { return params.segment(item.segment); }
  CUTE_DEVICE QueryOf<Traits> query(const Item& item) const {
    return {segment(item), smem, smem.items[item.slot], warpgroup, thread};
  }
  CUTE_DEVICE Epilogue epilogue(const Item& item) const {
    const ItemState& state = smem.items[item.slot];
    return {segment(item), state.item, state.request, state.num_rows};
  }
  CUTE_DEVICE int warp() const { return warpgroup * kWarpgroupWarps + thread / 32; }
};

}  // namespace preflash::sm90
