// The consumer main loop. A warpgroup computes S = Q K^T, finishes its scores, applies the online
// softmax and accumulates O += P V over the KV tiles of its work items. step() is the schedule, for
// all kernels but those whose items two CTAs share (paired_mainloop.cuh). README.md has it as a
// table, and the policies in which kernels differ.
#pragma once

#include "kernels/sm90/item_loop.cuh"

namespace preflash::sm90 {

template <class Traits>
using MmaOf =
    conditional_t<Traits::kSliced, SlicedMma<Traits>,
                  conditional_t<Traits::kTransposesV, EightBitMma<Traits>, WholeMma<Traits>>>;

template <class Traits>
struct ForwardMainloop : ItemLoop<Traits, ForwardMainloop<Traits>, MmaOf<Traits>> {
  using Base = ItemLoop<Traits, ForwardMainloop<Traits>, MmaOf<Traits>>;
  using Base::Base;
  using Base::mma;

  // The schedule: S(t) of `s` and P V(t - 1) of `o`, where t - 1 is the tile before in the
  // sequence, and then P(t). Between two turns of this warpgroup the other warpgroups' products
  // run.
  template <Work kWork>
  CUTE_DEVICE void step(const auto& s, const auto& o, const auto& meanwhile) {
    constexpr bool kQk = kWork != Work::kPv;
    constexpr bool kPv = kWork != Work::kQk;
    constexpr bool kSoftmaxFirst = s.kFirst && Traits::kSoftmaxBeforeStore;
    if constexpr (kQk) {
      mma.issue_qk();  // K(t) has arrived, and it is this warpgroup's turn
      if constexpr (!s.kFirst) this->scores.issue_bias(mma);
    }
    if constexpr (kPv) mma.issue_pv();  // V(t - 1) has arrived
    if constexpr (kQk) mma.order_barrier_arrive();
    meanwhile();
    if constexpr (kQk) {
      mma.template wait_for_s<kPv>(this->is_last(s));
      this->finish_scores(s);  // factors, soft cap, bias, mask
    }
    if constexpr (kPv) mma.wait_for_o();
    if constexpr (kQk && kSoftmaxFirst) this->exponentiate(s);
    if constexpr (kPv) this->finish_o(o);
    if constexpr (kQk && !kSoftmaxFirst) this->exponentiate(s);
  }
};

}  // namespace preflash::sm90
