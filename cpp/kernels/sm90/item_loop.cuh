// The work items of a consumer warpgroup. The KV tiles of all items form one sequence, so an item's
// first QK product overlaps with the last PV product of the item before it: an item begins with a
// step of QK alone or in the step of the last item's PV, and ends in the next item's first step or
// with PV alone. An item's first tile has its highest keys.
//
// After an item whose last tiles a warpgroup skips (Traits::kSkipsTiles, as under a window), the
// item's last O and the next item's first S run by themselves.
#pragma once

#include "kernels/sm90/eight_bit.cuh"
#include "kernels/sm90/load_query.cuh"
#include "kernels/sm90/mask_policies.cuh"
#include "kernels/sm90/mma.cuh"
#include "kernels/sm90/soft_cap.cuh"

namespace preflash::sm90 {

template <class Traits>
using SoftmaxOf = conditional_t<
    Traits::kCapsInSoftmax,
    CappedSoftmax<(Traits::kConsumers > 2), Traits::kVariant.q_dtype == DType::kFloat16>,
    conditional_t<Traits::kTransposesV, EightBitSoftmax<Traits::kAddsWeights>, SpeculativeSoftmax>>;

// A step computes S = Q K^T of a tile, O += P V of the tile before it, or both.
enum class Work { kQk, kPv, kQkPv };

// Loop: the derived class, with step<Work>(s, o, meanwhile), the order of products, softmax and
// epilogue in a step.
template <class Traits, class Loop, class Mma>
struct ItemLoop {
  const ParamsOf<Traits>& params;
  SharedStorage<Traits>& smem;
  int warpgroup;  // among consumers
  int thread;     // of the warpgroup
  Mma mma;
  MaskOf<Traits> mask;  // of the item whose scores come next, as are its scores
  Scores<Traits> scores;
  SoftmaxOf<Traits> softmax = {};
  std::uint32_t item_phase = 0;
  ItemTimer timer;

  CUTE_DEVICE ItemLoop(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem, int warpgroup,
                       int thread)
      : params(params),
        smem(smem),
        warpgroup(warpgroup),
        thread(thread),
        mma(params.segments[0], smem, warpgroup, thread) {}

  CUTE_DEVICE void run() {
    Item item = read_item(0);
    Ahead ahead = mask.look_ahead(item, at(item));
    while (item.any()) {
      if (Traits::kMayIdle && item.idle) {
        item = stay_idle(item);
        ahead = mask.look_ahead(item, at(item));
        continue;
      }
      Transition transition = begin(item, ahead);
      for (;;) {
        run_steps(item, transition);
        mma.q_read.advance();
        // NOTE: this warpgroup passes its turns at the tiles that it skips before it waits for the
        // next Q: the others release Q only after their turns.
        const Item& next = transition.next;
        if (item.skipped_last > 0 || !next.any() || (Traits::kMayIdle && next.idle)) break;
        Transition next_transition = next_item_step(item, transition);
        item = transition.next;
        transition = next_transition;
      }
      end(item, transition);
      item = transition.next;
      ahead = transition.ahead;
    }
  }

 protected:
  using Epilogue = ForwardEpilogue<Traits>;
  using Prepared = typename Epilogue::Prepared;
  using Ahead = typename MaskOf<Traits>::Ahead;

  // A work item as one warpgroup sees it.
  struct Item {
    int slot = 0;  // of SharedStorage::items
    conditional_t<(Traits::kSegments > 1), int, C<0>> segment = {};
    conditional_t<Traits::kMayIdle, bool, C<false>> idle = {};  // this warpgroup computes nothing
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
    Ahead ahead = {};  // of the next item
    RowTarget target;  // of this item's row
  };

  // An item's tiles, as the policies see them.
  struct TilesAt {
    const ItemLoop& loop;
    const Item& item;

    CUTE_DEVICE ScoreCoordinates<Traits> operator()(int tile) const {
      return {loop.view(item), loop.warp() * kWarpRows, own_tile<Traits>(tile)};
    }
    CUTE_DEVICE SharedStorage<Traits>& smem() const { return loop.smem; }
    CUTE_DEVICE int warpgroup() const { return loop.warpgroup; }
  };
  CUTE_DEVICE TilesAt at(const Item& item) const { return {*this, item}; }

  // S is of `tile`: an item's first one, or a later one.
  struct First {
    const Item& item;
    const Ahead& ahead;
    int tile;
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

  // S is complete. Sets the rows' first references, which does not need O.
  CUTE_DEVICE void finish_scores(const First& s) {
    scores.finish(at(s.item)(s.tile), mma);
    mask.apply(s.item, s.tile, at(s.item), mma, s.ahead);
    softmax.begin(mma, scores.shift(s.tile), segment(s.item));
    mma.begin_item(smem.items[s.item.slot]);
  }
  CUTE_DEVICE void finish_scores(const Later& s) {
    // Steps without P V, before skipped tiles, allow no softmax that does something here.
    static_assert(Traits::kVariant.sparsity == Sparsity::kDense ||
                  is_same_v<SoftmaxOf<Traits>, SpeculativeSoftmax>);
    scores.finish(segment(s.item), mma);
    softmax.before_o(mma, scores.shift(s.tile), segment(s.item), mask_of(s));
  }

  // P of S, unless the tile is skipped.
  CUTE_DEVICE void exponentiate(const First& s) {
    softmax.update(mma, scores.shift(s.tile), segment(s.item));
  }
  CUTE_DEVICE void exponentiate(const Later& s) {
    if (mask.skips()) return;
    softmax.update(mma, scores.shift(s.tile), segment(s.item), mask_of(s));
  }

  // O has the P V of every tile before the one that S is of.
  CUTE_DEVICE void finish_o(const Later& o) { softmax.after_o(mma, segment(o.item)); }
  CUTE_DEVICE void finish_o(const Last& o) {
    for (int i = 0; i < o.skipped_v; ++i) mma.skip_v();
    epilogue(o.item).store(o.ready, mma, smem.o[warp()]);
    // The first warpgroup's rows always exist.
    if (warpgroup == 0 && thread == 0) timer.stop(params, smem.items[o.item.slot]);
    release_item(o.item);
    timer.start();  // of the next item
  }

  CUTE_DEVICE bool is_last(const auto& s) const { return mask.is_last(s.item, s.tile); }
  CUTE_DEVICE const auto& segment(const Item& item) const { return params.segment(item.segment); }
  CUTE_DEVICE int warp() const { return warpgroup * kWarpgroupWarps + thread / 32; }

 private:
  template <Work kWork>
  CUTE_DEVICE void step(const auto& s, const auto& o, const auto& meanwhile) {
    static_cast<Loop*>(this)->template step<kWork>(s, o, meanwhile);
  }

  // The steps of an item after its first one.
  CUTE_DEVICE void run_steps(const Item& item, Transition& transition) {
    auto later_step = [&](int tile, const auto& meanwhile) __attribute__((always_inline)) {
      const Later later{item, tile};
      // NOTE: no product is in flight where the branches part or meet: wgmma would be serialized.
      if (mask.skips()) {  // the tile before: it has no P V
        step<Work::kQk>(later, None{}, [&] {
          mma.skip_v();
          meanwhile();
        });
      } else {
        step<Work::kQkPv>(later, later, meanwhile);
      }
    };
    mask.for_others(item, at(item), later_step, [&] { transition = prepare_transition(item); });
  }

  // An item's first step, if no item came right before.
  CUTE_DEVICE Transition begin(const Item& item, const Ahead& ahead) {
    timer.start();
    for (int i = 0; i < item.skipped_first; ++i) {
      mma.skip_k();
      mma.skip_v();
    }
    Transition transition;
    const First first = wait_for_q(item, ahead);
    step<Work::kQk>(first, None{}, [&] { begin_scores(item, transition); });
    return transition;
  }

  // The step from one item to the next: S is of `next`, O of `last`. LSE and factors of `last` are
  // computed beside the products, before the softmax begins anew. Returns the transition after this
  // one.
  CUTE_DEVICE Transition next_item_step(const Item& last, const Transition& transition) {
    const Item& next = transition.next;
    for (int i = 0; i < next.skipped_first; ++i) mma.skip_k();
    Transition next_transition;
    Prepared ready;
    const First first = wait_for_q(next, transition.ahead);
    step<Work::kQkPv>(first, Last{last, ready, next.skipped_first}, [&] {
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
      mma.skip_k();
      mma.skip_v();
    }
  }

  // An item in which this warpgroup has no rows: releases the buffers as early as possible, and
  // returns the next item.
  CUTE_DEVICE Item stay_idle(const Item& item) {
    mma.skip_q();
#pragma unroll 1
    for (int tile = item.own.begin; tile < item.own.end; ++tile) {
      mma.skip_k();
      mma.skip_v();
    }
    release_item(item);
    return read_item(next_slot(item));
  }

  CUTE_DEVICE Transition prepare_transition(const Item& item) {
    Transition transition;
    transition.target = epilogue(item).target_of(warp() * kWarpRows + lane_id() % kWarpRows);
    transition.next = read_item(next_slot(item));
    transition.ahead = mask.look_ahead(transition.next, at(transition.next));
    return transition;
  }

  CUTE_DEVICE First wait_for_q(const Item& item, const Ahead& ahead) {
    const First first{item, ahead, mask.take_first(item)};
    query(item).arrive();
    return first;
  }
  CUTE_DEVICE QueryOf<Traits> query(const Item& item) const {
    return {segment(item), smem, smem.items[item.slot], mma.q_read, warpgroup, thread};
  }
  // Beside an item's first products.
  CUTE_DEVICE void begin_scores(const Item& item, Transition& transition) {
    scores = Scores<Traits>::of(at(item)(item.own.begin), query(item));
    if (mask.begin(item, at(item))) transition = prepare_transition(item);
  }
  CUTE_DEVICE auto mask_of(const Later& s) {
    return [this, s] { return mask.apply(s.item, s.tile, at(s.item), mma); };
  }

  CUTE_DEVICE Prepared prepare_o(const Item& item, const Transition& transition) {
    return epilogue(item).prepare(mma, softmax, scores.bias, at(item)(item.own.begin),
                                  transition.target);
  }
  CUTE_DEVICE ItemView view(const Item& item) const {
    return ItemView::of(segment(item), smem.items[item.slot]);
  }
  CUTE_DEVICE Epilogue epilogue(const Item& item) const { return {view(item)}; }

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
};

}  // namespace preflash::sm90
