// Gathered loads by cp.async, for page sizes that TMA's swizzle cannot serve (above all 1).
#pragma once

#include "kernels/sm90/copy_rows.cuh"
#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/tile_stream.cuh"

namespace preflash::sm90 {

// Each producer warp copies a quarter of the rows of both operands, eight lanes 128 bytes of a row.
template <class Traits, template <class, Operand> class Writer = TileWriter>
struct GatherLoader {
  static constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;
  static constexpr int kOwned = ceil_div(kWarpKeys, 32);  // rows whose page a lane looks up
  static constexpr int kRowsPerPass = 4;
  static constexpr int kPasses = kWarpKeys / kRowsPerPass;
  static_assert(kWarpKeys % kRowsPerPass == 0);

  // Rows i * 32 + lane_id() of the warp's quarter, looked up ahead: page indices come from the L2.
  struct RowSlots {
    KeySlot slot[kOwned];
  };

  const ParamsOf<Traits>& params;
  Writer<Traits, Operand::kK> k;
  Writer<Traits, Operand::kV> v;
  ItemKeys item;
  TransactionBarrier* unpublished = nullptr;  // the rows that it announces are in flight

  CUTE_DEVICE GatherLoader(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : params(params), k{smem}, v{smem} {}

  // Loads K(last), then K(t - 1) and V(t) for each tile: the consumers compute S(t - 1) = Q K^T
  // before O += P V(t). The page lookup runs two tiles ahead of V.
  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto& after_first) {
    item = ItemKeys::of(state);
    int tile = tiles.first(state);
    RowSlots rows = find_rows(tile);
    int next = tiles.next();
    RowSlots next_rows = find_rows(next);
    load(k, rows, tile);
    after_first();
    while (next != kNoTile) {
      const int ahead = tiles.next();
      RowSlots ahead_rows = find_rows(ahead);
      load(k, next_rows, next);
      load(v, rows, tile);
      tile = next;
      rows = next_rows;
      next = ahead;
      next_rows = ahead_rows;
    }
    load(v, rows, tile);
  }

  CUTE_DEVICE void drain() {
    cp_async_wait<0>();
    publish();
  }

 protected:
  CUTE_DEVICE const HopperSegment& segment() const { return params.segment(item.segment); }
  CUTE_DEVICE static int warp_row() { return threadIdx.x / 32 * kWarpKeys; }

  CUTE_DEVICE RowSlots find_rows(int tile) const {
    RowSlots rows;
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      int key = tile * Traits::kTileN + warp_row() + i * 32 + lane_id();
      rows.slot[i] = find_slot_within(segment(), item, key);
    }
    return rows;
  }

  template <class Target>
  CUTE_DEVICE void load(Target& write, const RowSlots& rows, int tile) {
    write.wait();
    fetch<Target::kBlocks>(rows, tile, Target::tensor(segment()), Target::head_dim(segment()),
                           write.tile());
    announce(write);
  }

  // What the warp has copied to `write`, which goes on to its next tile or slice.
  template <class Target>
  CUTE_DEVICE void announce(Target& write) {
    if constexpr (Target::kIsRaw) {
      // No tensor core reads it.
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<std::uint64_t*>(&write.full()));
    } else {
      publish_before(write.full());
    }
    write.next.advance();
  }

  // Announces the tile before; the current tile stays in flight.
  CUTE_DEVICE void publish_before(TransactionBarrier& full) {
    cp_async_fence();
    cp_async_wait<1>();
    publish();
    unpublished = &full;
  }
  // NOTE: cp.async writes through the generic proxy and wgmma reads through the async one.
  CUTE_DEVICE void publish() {
    if (unpublished == nullptr) return;
    cutlass::arch::fence_view_async_shared();
    unpublished->arrive();
    unpublished = nullptr;
  }

  // Copies the warp's rows of a tile, in kBlocks blocks of columns.
  template <int kBlocks, class Element>
  CUTE_DEVICE void fetch(const RowSlots& slots, int tile, const KvTensor& tensor, int head_dim,
                         Element* to) const {
    constexpr int kColumns = kBlockColumns<Element>;
    std::int64_t offsets[kOwned];
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) offsets[i] = slot_offset(tensor, slots.slot[i]);
    int first_key = tile * Traits::kTileN;
    copy_tile<Traits>(item, first_key, head_dim >= kBlocks * kColumns, [&](auto rows) {
      constexpr int kPassesPerOwned = 32 / kRowsPerPass;
      int column = lane_id() % 8 * (kCopyBytes / sizeof(Element));
      int lane_row = lane_id() / 8;
      auto* head =
          static_cast<const Element*>(tensor.data) + item.kv_head * tensor.stride_head + column;
      // A pass covers 4 of the 8 rows that the swizzle tells apart: even and odd passes differ.
      int row = warp_row() + lane_row;
      std::uint32_t places = cast_smem_ptr_to_uint(to) + row * kBlockRowBytes;
      std::uint32_t targets[2] = {places + (lane_id() % 8 ^ row % 8) * 16,
                                  places + (lane_id() % 8 ^ (row + kRowsPerPass) % 8) * 16};
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        const Element* source =
            head + __shfl_sync(0xffffffffu, offsets[pass / kPassesPerOwned],
                               pass % kPassesPerOwned * kRowsPerPass + lane_row);
        std::uint32_t target = targets[pass % 2] + pass * kRowsPerPass * kBlockRowBytes;
        int key = first_key + row + pass * kRowsPerPass;
        CUTE_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          int bytes_left = (head_dim - block * kColumns - column) * int(sizeof(Element));
          copy_piece<rows>(item, key, bytes_left, target + block * Traits::kTileN * kBlockRowBytes,
                           source + block * kColumns);
        }
      }
    });
  }
};

}  // namespace preflash::sm90
