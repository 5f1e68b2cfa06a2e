// The consumer main loop. A warpgroup computes S = Q K^T, finishes its scores, applies the online
// softmax and accumulates O += P V over the KV tiles of its work items, from the highest keys of an
// item down. The tiles of all items form one sequence, so an item's first QK product overlaps with
// the last PV product of the item before it. step() is the schedule; an item begins with a step of
// QK alone or in the step of the last item's PV, and ends in the next item's first step or with PV
// alone. README.md has the schedule as a table, and the policies in which kernels differ.
//
// First and last are in that order: an item's first tile has its highest keys. After an item whose
// last tiles a warpgroup skips (Traits::kSkipsTiles, as under a window), the item's last O and the
// next item's first S run by themselves.
#pragma once

#include "kernels/sm90/capped_softmax.cuh"
#include "kernels/sm90/consumer_tiles.cuh"
#include "kernels/sm90/eight_bit_operands.cuh"
#include "kernels/sm90/load_query.cuh"

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
        // NOTE: this warpgroup passes its turns at the tiles that it skips before it waits for the
        // next Q: the others release Q only after their turns.
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
  using Prepared = typename Epilogue::Prepared;
  using Coordinates = ScoreCoordinates<Traits>;
  using FirstTile = typename TilesOf<Traits>::First;

  // A work item as one warpgroup sees it.
  struct Item : SegmentOfItem<Traits::kSegments>, SlotOfItem<Traits::kMayIdle> {
    TileRange own;          // the tiles that this warpgroup's rows touch
    int skipped_first = 0;  // tiles before them, in the order of the loop
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

  // A step computes S = Q K^T of a tile, O += P V of the tile before it, or both.
  enum class Work { kQk, kPv, kQkPv };

  // S is of an item's first tile, or of a later one.
  struct First {
    const Item& item;
    const FirstTile& ahead;
    static constexpr bool kFirst = true;
  };
  struct Later {
    const Item& item;
    int tile;
    static constexpr bool kFirst = false;
  };
  // O is of an item that this P V ends. Later: of an item that goes on.
  struct Last {
    const Item& item;
    const Prepared& ready;
    int skipped_v;  // tiles of V that this warpgroup passes before it stores O
  };
  struct None {
    static constexpr bool kFirst = false;
  };

  // The schedule: S(t) of `s` and P V(t - 1) of `o`, where t - 1 is the tile before in the
  // sequence, and then P(t). Between two turns of this warpgroup the other warpgroups' products
  // run.
  template <Work kWork>
  CUTE_DEVICE void step(const auto& s, const auto& o, const auto& meanwhile) {
    constexpr bool kQk = kWork != Work::kPv;
    constexpr bool kPv = kWork != Work::kQk;
    constexpr bool kSoftmaxFirst = s.kFirst && Traits::kSoftmaxBeforeStore;
    if constexpr (kQk) {
      // Whole tiles: K(t) has arrived, and it is this warpgroup's turn.
      operands.order_barrier_wait();
      operands.issue_qk(operands.q());
      if constexpr (!s.kFirst) scores.bias.issue(smem, operands.tSrS);
    }
    if constexpr (kPv) operands.issue_pv();  // V(t - 1) has arrived
    if constexpr (kQk) operands.order_barrier_arrive();
    meanwhile();
    if constexpr (kQk) {
      operands.template wait_for_s<kPv>();
      finish_scores(s);  // factors, soft cap, bias, mask
    }
    if constexpr (kPv) {
      operands.wait_for_o();
      operands.release_v();
    }
    if constexpr (kQk && kSoftmaxFirst) exponentiate(s);
    if constexpr (kPv) finish_o(o);
    if constexpr (kQk && !kSoftmaxFirst) exponentiate(s);
  }

  // The steps of an item after its first one.
  CUTE_DEVICE void run_steps(const Item& item, Transition& transition) {
    auto later_step = [&](int tile, const auto& meanwhile) __attribute__((always_inline)) {
      const Later later{item, tile};
      // NOTE: no product is in flight where the branches part or meet: wgmma would be serialized.
      if (skipped.latest_tile()) {  // the tile before: it has no P V
        step<Work::kQk>(later, None{}, [&] {
          operands.skip_v();
          meanwhile();
        });
      } else {
        step<Work::kQkPv>(later, later, [&] {
          operands.release_p_mailbox();
          meanwhile();
        });
      }
    };
    tiles.for_others(item, at(item), later_step, [&] { transition = prepare_transition(item); });
  }

  // An item's first step, if no item came right before.
  CUTE_DEVICE Transition begin(const Item& item, const FirstTile& ahead) {
    timer.start();
    for (int i = 0; i < item.skipped_first; ++i) {
      operands.skip_k();
      operands.skip_v();
    }
    Transition transition;
    wait_for_q(item);
    step<Work::kQk>(First{item, ahead}, None{}, [&] { begin_scores(item, transition); });
    return transition;
  }

  // The step from one item to the next: S is of `next`, O of `last`. LSE and factors of `last` are
  // computed beside the products, before the softmax begins anew. Returns the transition after this
  // one.
  CUTE_DEVICE Transition next_item_step(const Item& last, const Transition& transition) {
    const Item& next = transition.next;
    for (int i = 0; i < next.skipped_first; ++i) operands.skip_k();
    Transition next_transition;
    Prepared ready;
    wait_for_q(next);
    step<Work::kQkPv>(First{next, transition.next_first}, Last{last, ready, next.skipped_first},
                      [&] {
                        ready = prepare_o(last, transition);
                        begin_scores(next, next_transition);
                      });
    return next_transition;
  }

  // An item's last step, if no item directly follows.
  CUTE_DEVICE void end(const Item& item, const Transition& transition) {
    Prepared ready;
    step<Work::kPv>(None{}, Last{item, ready, 0}, [&] { ready = prepare_o(item, transition); });
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

  CUTE_DEVICE void wait_for_q(const Item& item) {
    tiles.begin_step();
    query(item).arrive(operands.q_read);
  }
  // Beside an item's first products.
  CUTE_DEVICE void begin_scores(const Item& item, Transition& transition) {
    scores = Scores<Traits>::of(at(item)(item.own.begin), smem);
    tiles.meanwhile(item, at(item));
    if (tiles.prepares_in_first_step(item)) transition = prepare_transition(item);
  }

  // S is complete: K(t) is free, and Q after the item's last tile.
  CUTE_DEVICE void release_k(const Item& item, int tile) {
    operands.release_k();
    if (tiles.is_last(item, tile)) operands.release_q();
  }
  CUTE_DEVICE void finish_scores(const Later& s) {
    release_k(s.item, s.tile);
    scores.finish(segment(s.item), operands.rows_of_s());
    if constexpr (!softmax.kMasks) tiles.mask(s.item, s.tile, at(s.item), operands.rows_of_s());
    // An item's last tile is never skipped: the transition to the next item contains its P V.
    skipped.look_at(operands.rows_of_s(), tiles.is_last(s.item, s.tile), warpgroup);
    // A step without P V calls it, too: only a softmax that does nothing here has such steps.
    static_assert(!SkippedTiles<Traits>::kSkips ||
                  is_same_v<SoftmaxOf<Traits>, SpeculativeSoftmax>);
    softmax.before_o(operands.rows_of_s(), scores.bias.shift(s.tile), segment(s.item));
  }
  // Also sets the rows' first references, which does not need O.
  CUTE_DEVICE void finish_scores(const First& s) {
    int tile = tiles.first(s.item);
    Coordinates coordinates = at(s.item)(tile);
    release_k(s.item, tile);
    scores.finish_first(segment(s.item), coordinates, operands.rows_of_s());
    tiles.mask_first(s.item, s.ahead, operands.rows_of_s());
    skipped.begin(coordinates, operands.rows_of_s());
    softmax.begin(operands.rows_of_s(), scores.bias.shift(tile), segment(s.item));
    operands.begin_item(smem.items[s.item.slot]);
  }

  // P of S, unless the tile is skipped.
  CUTE_DEVICE void exponentiate(const Later& s) {
    if (skipped.latest_tile()) return;
    auto rows_of_o = operands.rows_of_o();
    auto mask = [&] { return tiles.mask(s.item, s.tile, at(s.item), operands.rows_of_s()); };
    softmax.update(operands.rows_of_s(), scores.bias.shift(s.tile), operands.tOrP, rows_of_o,
                   segment(s.item), mask);
    operands.exchange_p(softmax, segment(s.item), tiles.is_last(s.item, s.tile));
  }
  CUTE_DEVICE void exponentiate(const First& s) {
    const int tile = tiles.first(s.item);
    softmax.make_first(operands.rows_of_s(), scores.bias.shift(tile), operands.tOrP,
                       segment(s.item));
    operands.exchange_p(softmax, segment(s.item), tiles.is_last(s.item, tile));
  }

  // O has the P V of every tile before the one that S is of.
  CUTE_DEVICE void finish_o(const Later& o) {
    softmax.after_o(operands.rows_of_o());
    operands.add_up(softmax, segment(o.item));
  }
  CUTE_DEVICE void finish_o(const Last& o) {
    for (int i = 0; i < o.skipped_v; ++i) operands.skip_v();
    operands.finish_o();
    epilogue(o.item).store(o.ready, operands.tOrO, smem.o[warp()]);
    operands.release_p_mailbox();
    // The first warpgroup's rows always exist.
    if (warpgroup == 0 && thread == 0) timer.stop(params, smem.items[o.item.slot]);
    release_item(o.item);
    timer.start();  // of the next item
  }
  CUTE_DEVICE Prepared prepare_o(const Item& item, const Transition& transition) {
    operands.prepare_o(softmax, segment(item));
    return epilogue(item).prepare(softmax, scores.bias, at(item)(item.own.begin),
                                  transition.target);
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
    if constexpr (Traits::kSegments > 1) item.segment = warp_uniform(state.request.segment);
    if constexpr (Traits::kMayIdle) {
      item.idle =
          warp_uniform(state.num_rows) <= warpgroup * kWarpgroupRows && idles(state, end - begin);
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
  // True if an idle warpgroup saves more than it costs where the item begins and ends. It does not
  // in short items, nor beside other query tiles of the request (measured:
  // docs/dev/experiments/fa3-main-loop.md).
  CUTE_DEVICE static bool idles(const ItemState& state, int tiles) {
    constexpr int kFewestTiles = 8;
    return Traits::kSegments > 1 ||
           (warp_uniform(state.item.row_begin) == 0 && tiles >= kFewestTiles);
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
