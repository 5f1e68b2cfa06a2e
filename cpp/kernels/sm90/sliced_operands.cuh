// K and V in slices of 128 columns, with the hooks of WholeOperands. A slice is released when its
// product is complete. There are no turns: the ring of kernels with two CTAs to an item is shorter
// than a step, so a warpgroup waiting for its turn would keep the other from its slices.
#pragma once

#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/whole_operands.cuh"

namespace preflash::sm90 {

template <class Traits>
struct SlicedOperands : Accumulators<Traits> {
  using Base = Accumulators<Traits>;
  using Base::smem;
  using Base::thread;
  using typename Base::MmaPv;
  using typename Base::MmaQk;

  static_assert(Traits::kSliceSlots >= 4 && Traits::kVariant.sparsity == Sparsity::kDense);

  int num_k;             // slices of a K tile
  bool holds_k = false;  // the last slice of K, which S is made of
  ConsumerPipelineState<Traits::kSliceSlots> next = {};
  ConsumerPipelineState<Traits::kSliceSlots> held = {};  // the first that is not released

  CUTE_DEVICE SlicedOperands(const HopperSegment& params, SharedStorage<Traits>& smem,
                             int warpgroup, int thread)
      : Base(smem, warpgroup, thread), num_k(slices_of_k<Traits>(params)) {}

  CUTE_DEVICE static void order_barrier_wait() {}
  CUTE_DEVICE static void order_barrier_arrive() {}

  CUTE_DEVICE void issue_qk(const auto& tSrQ) {
    issue_qk_slice(tSrQ, 0, wait_for_slice());
#pragma unroll 1
    for (int slice = 1; slice < num_k; ++slice) {
      issue_qk_slice(tSrQ, slice, wait_for_slice());
      warpgroup_wait<1>();
      release_slice();
    }
    holds_k = true;
  }
  CUTE_DEVICE void issue_pv() { issue_pv_of(this->first_pv); }
  template <bool kPvBehind>
  CUTE_DEVICE void wait_for_s() {
    wait_for_product<kPvBehind ? 2 : 0>(this->tSrS);
  }
  CUTE_DEVICE void wait_for_o() { wait_for_product<0>(this->tOrO); }

  CUTE_DEVICE void release_k() {
    if (holds_k) release_slice();
    holds_k = false;
  }
  CUTE_DEVICE void release_v() {
    release_slice();
    release_slice();
  }
  CUTE_DEVICE static void skip_k() {}
  CUTE_DEVICE static void skip_v() {}

 protected:
  // first: Zero overwrites O, One adds to it.
  CUTE_DEVICE void issue_pv_of(GMMA::ScaleOut first) {
    issue_pv_slice(0, first);
    issue_pv_slice(1, first);
  }
  CUTE_DEVICE void release_slice() {
    release(smem.slice.ring.empty[held.index()]);
    held.advance();
  }

 private:
  // Returns the slot of the next slice.
  CUTE_DEVICE int wait_for_slice() {
    const int slot = next.index();
    smem.slice.ring.full[slot].wait(next.phase());
    next.advance();
    return slot;
  }
  CUTE_DEVICE void issue_qk_slice(const auto& tSrQ, int slice, int slot) {
    constexpr int kDepth = Traits::kSliceColumns / 16;
    MmaQk mma;
    Tensor sK = make_tensor(make_smem_ptr(&smem.slices[0][0]),
                            typename Traits::LayoutSliceK{});      // (n, columns, slots)
    Tensor tSrK = mma.get_slice(thread).partition_fragment_B(sK);  // (MMA, MMA_N, MMA_K, slots)
    multiply_async<kDepth>(mma, tSrQ, slice * kDepth, tSrK(_, _, _, slot), this->tSrS,
                           slice == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
  }
  // slice: of the columns of O. first: as above.
  CUTE_DEVICE void issue_pv_slice(int slice, GMMA::ScaleOut first) {
    const int slot = wait_for_slice();
    using Part = decltype(partition_fragment_C(MmaPv{}, Shape<_64, Int<Traits::kMmaColumnsPv>>{}));
    MmaPv mma;
    Tensor sV = make_tensor(make_smem_ptr(&smem.slices[0][0]),
                            typename Traits::LayoutSliceV{});      // (columns, n, slots)
    Tensor tOrV = mma.get_slice(thread).partition_fragment_B(sV);  // (MMA, MMA_N, MMA_K, slots)
    Tensor part = make_tensor(&this->tOrO(0) + slice * size(Part{}), typename Part::layout_type{});
    multiply_async(mma, this->tOrP, tOrV(_, _, _, slot), part, first);
  }
};

// Slices where two CTAs of a cluster compute an item (README.md, "More than 256 columns of O").
// Both take the larger reference of the two, so that one softmax, whose speculation may fail in
// either half, is that of all keys. A slice is released two slices behind at the latest.
template <class Traits>
struct PairedOperands : SlicedOperands<Traits> {
  using Base = SlicedOperands<Traits>;
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
    if (__any_sync(0xffffffffu, rows.x != softmax.reference[0] || rows.y != softmax.reference[1])) {
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
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) softmax.sum[r] += lane_id() % 4 == 0 ? other_sum[r] : 0.0f;
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
    const uint4 rows{__float_as_uint(softmax.reference[0]), __float_as_uint(softmax.reference[1]),
                     sum(0), sum(1)};
    if (lane_id() % 4 == 0) send(in_other(&pair.rows[warp()][lane_id() / 4]), rows);
  }
  // Makes O, both parts of P, and their sums relative to the larger reference of each row.
  CUTE_DEVICE void sync_row_max(auto& softmax, const float (&others)[2], float scale_log2) {
    auto rows_of_o = this->rows_of_o();
    OperandP other;
    read_p_mailbox(other);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float before = softmax.reference[r];
      const float next = fmaxf(before, others[r]);
      const float own_factor = softmax.change_of_reference(before, next, scale_log2);
      const float other_factor = softmax.change_of_reference(others[r], next, scale_log2);
      softmax.reference[r] = next;
      softmax.sum[r] *= own_factor;
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
    }
    Tensor pieces = recast<uint4>(other);
    CUTE_UNROLL
    for (int i = 0; i < size(pieces); ++i) p_mailbox()[i * 32] = pieces(i);
  }
};

}  // namespace preflash::sm90
