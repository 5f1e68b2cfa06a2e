// The main loop where two CTAs of a cluster compute an item (README.md, "More than 256 columns of
// O").
#pragma once

#include "kernels/sm90/item_loop.cuh"

namespace preflash::sm90 {

// Slices where two CTAs of a cluster compute an item (README.md, "More than 256 columns of O").
// Both take the larger reference of the two, so that one softmax, whose speculation may fail in
// either half, is that of all keys. A slice is released two slices behind at the latest.
template <class Traits>
struct PairedMma : SlicedMma<Traits> {
  using Base = SlicedMma<Traits>;
  using Base::smem;
  using Base::thread;
  using typename Base::OperandP;

  static constexpr int kMessage = 32 * sizeof(OperandP) + 8 * sizeof(float4);  // bytes of a warp's
  static_assert(32 * sizeof(OperandP) == sizeof(smem.o[0]), "a mailbox holds the rows of a warp");

  float other_sum[2];  // of this thread's rows, over the other CTA's keys
  std::uint32_t message_phase = 0;

  using Base::Base;

  // Completes S and P V of this CTA's keys, and leaves P V of the other's in flight: its P takes
  // the registers of this CTA's.
  CUTE_DEVICE void issue_pv() {
    Base::issue_pv();
    warpgroup_wait<2>();
    this->release_k();
    warpgroup_wait<1>();
    this->release_slice();
    warpgroup_wait<0>();
    this->release_slice();
    read_p_mailbox(this->tOrP);
    this->issue_pv_of(GMMA::ScaleOut::One);
  }

  // is_last: of the item.
  CUTE_DEVICE void exchange_p(auto& softmax, const auto& segment, bool is_last) {
    send_p(softmax, is_last);
    auto& full = smem.slice.pair.p.full[warp()];
    if (lane_id() == 0) full.arrive_and_expect_tx(kMessage);
    full.wait(message_phase);
    message_phase ^= 1;
    order_memory_accesses();
    const float4 rows = smem.slice.pair.rows[warp()][lane_id() / 4];
    other_sum[0] = rows.z;
    other_sum[1] = rows.w;
    const float references[2] = {rows.x, rows.y};
    if (__any_sync(0xffffffffu,
                   rows.x != softmax.row_max_ref[0] || rows.y != softmax.row_max_ref[1])) {
      sync_row_max(softmax, references, segment.logits.scale_log2);
    }
  }
  CUTE_DEVICE void release_p_mailbox() {
    order_memory_accesses();
    __syncwarp();
    smem.slice.pair.p.empty[warp()].arrive(other_cta(), lane_id() == 0);
  }
  // The other CTA's sums belong to one thread of each quad, which sums up its own.
  CUTE_DEVICE void prepare_o(auto& softmax, const auto&) const {
    for_rows([&](int r) { softmax.sum[r] += lane_id() % 4 == 0 ? other_sum[r] : 0.0f; });
  }

 private:
  CUTE_DEVICE int warp() const { return this->warpgroup * kWarpgroupWarps + thread / 32; }
  CUTE_DEVICE static unsigned other_cta() { return cta_rank<Traits>() ^ 1; }
  // This lane's pieces of P, 32 apart.
  CUTE_DEVICE uint4* p_mailbox() const {
    return reinterpret_cast<uint4*>(smem.o[warp()]) + lane_id();
  }
  CUTE_DEVICE void read_p_mailbox(OperandP& p) const {
    Tensor pieces = recast<uint4>(p);
    CUTE_UNROLL
    for (int i = 0; i < size(pieces); ++i) pieces(i) = p_mailbox()[i * 32];
  }

  // The sums count at an item's end alone.
  CUTE_DEVICE void send_p(const auto& softmax, bool is_last) {
    auto& pair = smem.slice.pair;
    pair.p.empty[warp()].wait(message_phase ^ 1);
    auto in_other = [](const void* place) {
      return cute::set_block_rank(cute::cast_smem_ptr_to_uint(place), other_cta());
    };
    const std::uint32_t full = in_other(&pair.p.full[warp()]);
    auto send = [&](std::uint32_t place, const uint4& piece) {
      asm volatile(
          "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
          "[%5];" ::"r"(place),
          "r"(piece.x), "r"(piece.y), "r"(piece.z), "r"(piece.w), "r"(full)
          : "memory");
    };
    const std::uint32_t place = in_other(p_mailbox());
    Tensor pieces = recast<uint4>(this->tOrP);
    CUTE_UNROLL
    for (int i = 0; i < size(pieces); ++i) send(place + i * 32 * sizeof(uint4), pieces(i));
    auto sum = [&](int r) {
      return __float_as_uint(is_last ? softmax.quad_sum(softmax.sum[r]) : 0.0f);
    };
    const uint4 rows{__float_as_uint(softmax.row_max_ref[0]),
                     __float_as_uint(softmax.row_max_ref[1]), sum(0), sum(1)};
    if (lane_id() % 4 == 0) send(in_other(&pair.rows[warp()][lane_id() / 4]), rows);
  }
  // Makes O, both parts of P, and their sums relative to the larger reference of each row.
  CUTE_DEVICE void sync_row_max(auto& softmax, const float (&others)[2], float scale_log2) {
    auto rows_of_o = this->rows_of_o();
    OperandP other;
    read_p_mailbox(other);
    for_rows([&](int r) {
      const float before = softmax.row_max_ref[r];
      const float next = fmaxf(before, others[r]);
      const float own_factor = softmax.change_of_reference(before, next, scale_log2);
      const float other_factor = softmax.change_of_reference(others[r], next, scale_log2);
      softmax.row_max_ref[r] = next;
      // The quad's sum becomes one number, as the other CTA gets it at an item's end. So a row has
      // the same bits whether its item ends here or goes on to tiles without keys of the row.
      const float sum = softmax.quad_sum(softmax.sum[r]);
      if (next != before) softmax.sum[r] = lane_id() % 4 == 0 ? sum * own_factor : 0.0f;
      other_sum[r] *= other_factor;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); ++c) rows_of_o(r, c) *= own_factor;
      auto scale = [&](OperandP& p, float factor) {
        auto rows_of_p = make_tensor(p.data(), as_rows_and_columns(p.layout()));
        CUTE_UNROLL
        for (int c = 0; c < size<1>(rows_of_p); ++c) {
          rows_of_p(r, c) = typename Traits::ElementP(static_cast<float>(rows_of_p(r, c)) * factor);
        }
      };
      scale(this->tOrP, own_factor);
      scale(other, other_factor);
    });
    Tensor pieces = recast<uint4>(other);
    CUTE_UNROLL
    for (int i = 0; i < size(pieces); ++i) p_mailbox()[i * 32] = pieces(i);
  }
};

template <class Traits>
struct PairedMainloop : ItemLoop<Traits, PairedMainloop<Traits>, PairedMma<Traits>> {
  using Base = ItemLoop<Traits, PairedMainloop<Traits>, PairedMma<Traits>>;
  using Base::Base;
  using Base::mma;

  // The schedule of ForwardMainloop, and the exchange of P(t) with the other CTA. There are no
  // turns, and O is stored before the next item's P is made: both use the mailbox.
  template <Work kWork>
  CUTE_DEVICE void step(const auto& s, const auto& o, const auto& meanwhile) {
    constexpr bool kQk = kWork != Work::kPv;
    constexpr bool kPv = kWork != Work::kQk;
    if constexpr (kQk) {
      mma.issue_qk();
      if constexpr (!s.kFirst) this->scores.issue_bias(mma);
    }
    if constexpr (kPv) mma.issue_pv();  // of this CTA's keys, and then of the other's
    if constexpr (kPv && kQk && !s.kFirst) mma.release_p_mailbox();
    meanwhile();
    if constexpr (kQk) {
      mma.template wait_for_s<kPv>(this->is_last(s));
      this->finish_scores(s);
    }
    if constexpr (kPv) {
      mma.wait_for_o();
      this->finish_o(o);
      if constexpr (!kQk || s.kFirst) mma.release_p_mailbox();  // O was staged in it
    }
    if constexpr (kQk) {
      this->exponentiate(s);
      mma.exchange_p(this->softmax, this->segment(s.item), this->is_last(s));
    }
  }
};

}  // namespace preflash::sm90
