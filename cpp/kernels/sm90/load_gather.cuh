// Gathered loads by cp.async, for page sizes that TMA's swizzle cannot serve (above all 1).
#pragma once

#include "kernels/sm90/copy_rows.cuh"
#include "kernels/sm90/tile_ring.cuh"
#include "kernels/sm90/tile_stream.cuh"

namespace preflash::sm90 {

// Each of kWarps producer warps copies a share of the rows of both operands, eight lanes 128 bytes
// of a row.
template <class Traits, class WriterK = TileWriter<Traits, Operand::kK>,
          class WriterV = TileWriter<Traits, Operand::kV>, int kWarps = kWarpgroupWarps>
struct GatherLoader {
  static constexpr int kWarpKeys = Traits::kTileN / kWarps;

  // Slots of rows lane_id(), lane_id() + 32, ... of the warp's share: page indices come from the
  // L2. If a tile has two parts, some lanes have slots of the first part, and some of the second.
  struct RowSlots {
    int tile;
    KeySlot slot[ceil_div(kWarpKeys, 32)];
  };

  const ParamsOf<Traits>& params;
  WriterK k;
  WriterV v;
  ItemKeys item;
  TransactionBarrier* unpublished = nullptr;  // the rows that it announces are in flight

  CUTE_DEVICE GatherLoader(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem)
      : params(params), k{smem}, v{smem} {}

  // Loads K of the first tile, then K of each next tile before V of this one: the consumers compute
  // S = Q K^T a tile ahead of O += P V.
  CUTE_DEVICE void load_item(const ItemState& state, auto& tiles, const auto& after_first) {
    item = ItemKeys::of(state);
    RowSlots before;
    auto look_up = [&](int tile) { return find_rows(tile); };
    for_each_tile(tiles, state, look_up, [&](const RowSlots& rows, bool is_first) {
      load(k, rows);
      if (is_first) {
        after_first();
      } else {
        load(v, before);
      }
      before = rows;
    });
    load(v, before);
  }

  CUTE_DEVICE void drain() {
    cp_async_wait<0>();
    publish();
  }

 protected:
  CUTE_DEVICE const HopperSegment& segment() const { return params.segment(item.segment); }
  CUTE_DEVICE static int warp_row() { return threadIdx.x / 32 * kWarpKeys; }

  CUTE_DEVICE RowSlots find_rows(int tile) const {
    RowSlots rows{tile};
    CUTE_UNROLL
    for (int i = 0; i < ceil_div(kWarpKeys, 32); ++i) {
      int row = i * 32 + lane_id();
      if (Traits::kClusterSize > 1) row += row / kWarpKeys * (Traits::kTileN - kWarpKeys);
      int key = tile * Traits::kItemTileN + warp_row() + row;
      rows.slot[i] = find_slot_within(segment(), item, key);
    }
    return rows;
  }
  // Returns the slots of one part of a tile, whose index is in units of kTileN keys.
  CUTE_DEVICE static RowSlots rows_of_part(const RowSlots& rows, int part) {
    static_assert(Traits::kClusterSize * kWarpKeys <= 32);
    const int lane = lane_id() + part * kWarpKeys;
    return {rows.tile * Traits::kClusterSize + part,
            {{__shfl_sync(0xffffffffu, rows.slot[0].page, lane),
              __shfl_sync(0xffffffffu, rows.slot[0].token, lane)}}};
  }

  template <class Target>
  CUTE_DEVICE void load(Target& write, const RowSlots& rows) {
    write.wait();
    fetch<Target::kBlocks>(rows, Target::Source::tensor(segment()),
                           Target::Source::head_dim(segment()), write.tile());
    announce(write);
  }

  // Commits the warp's copies to `write`, which advances to its next tile or slice.
  template <class Target>
  CUTE_DEVICE void announce(Target& write) {
    if constexpr (Target::kIsRaw) {
      // No tensor core reads it.
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<std::uint64_t*>(&write.full()));
    }
    if constexpr (!WriterV::kIsRaw) publish_before(Target::kIsRaw ? nullptr : &write.full());
    write.next.advance();
  }

  // Announces the tile before; the current tile stays in flight.
  CUTE_DEVICE void publish_before(TransactionBarrier* full) {
    cp_async_fence();
    cp_async_wait<1>();
    publish();
    unpublished = full;
  }
  // NOTE: cp.async writes through the generic proxy and wgmma reads through the async one.
  CUTE_DEVICE void publish() {
    if (unpublished == nullptr) return;
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    release(*unpublished);
    unpublished = nullptr;
  }

  // Copies the warp's rows of a tile, in kBlocks blocks of columns.
  template <int kBlocks, class Element>
  CUTE_DEVICE void fetch(const RowSlots& rows, const KvTensor& tensor, int head_dim,
                         Element* to) const {
    RowCopies<Traits, kWarpKeys, kBlocks * kBlockRowBytes, 8>::template copy<sizeof(Element)>(
        item, rows.tile * Traits::kTileN, warp_row(), tensor, head_dim, rows.slot,
        TilePlaces<Traits::kTileN>(to, warp_row()));
  }
};

}  // namespace preflash::sm90
