// Loads by cp.async: rows of tiles and slices, with and without conversion, and gathered tiles for
// page sizes that TMA's swizzle cannot serve (above all 1).
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "kernels/sm90/tile_ring.cuh"

namespace preflash::sm90 {

// A row outside the item's keys gets the slot of a row inside: its address is valid, and nothing is
// read from it.
CUTE_DEVICE KeySlot find_slot_within(const HopperSegment& params, const ItemKeys& item, int key) {
  return find_slot(params, item.kv_begin, max(min(key, item.keys.end - 1), item.keys.begin));
}

inline constexpr int kCopyBytes = 16;

// Copies a piece of a key's row, with `bytes_left` up to head_dim. Rows of no key, and columns past
// head_dim, become zeros: with 0 bytes nothing is read, so the address need not be mapped.
// kWhole: all rows and columns of the tile exist. kOnce: nothing else reads these keys. They are
// evicted first, or they would drive the page table and the plan out of the L2.
template <bool kWhole, bool kOnce>
CUTE_DEVICE void copy_piece(const ItemKeys& item, int key, int bytes_left, std::uint32_t target,
                            const void* source) {
  if constexpr (kWhole && kOnce) {
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
        "l"(source), "l"(policy)
        : "memory");
  } else if constexpr (kWhole) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
                 : "memory");
  } else {
    const bool kept = key >= item.keys.begin && key < item.keys.end;
    const int bytes = kept ? min(max(bytes_left, 0), kCopyBytes) : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target),
                 "l"(source), "r"(bytes)
                 : "memory");
  }
}

// Copies kRows rows of a tile by one warp, from `first_row` on: kLanes lanes share a row and copy
// kPieces pieces of it each. slots: lane i has those of rows i, i + 32, ... head_dim: columns that
// exist. place(pass, piece): target of this lane's piece.
template <class Traits, int kRows, int kRowBytes, int kLanes, bool kOnce = false>
struct RowCopies {
  static constexpr int kRowsAtOnce = 32 / kLanes;
  static constexpr int kPieces = kRowBytes / (kLanes * kCopyBytes);
  static_assert(kRows % kRowsAtOnce == 0 && kRowBytes % (kLanes * kCopyBytes) == 0);

  CUTE_DEVICE static int lane_row() { return lane_id() / kLanes; }
  CUTE_DEVICE static int lane_byte() { return lane_id() % kLanes * kCopyBytes; }

  template <int kElementBytes>
  CUTE_DEVICE static void copy(const ItemKeys& item, int first_key, int first_row,
                               const KvTensor& tensor, int head_dim, const KeySlot* slots,
                               const auto& place) {
    constexpr int kSlots = ceil_div(kRows, 32);
    const int row_bytes = head_dim * kElementBytes;
    std::int64_t offsets[kSlots];
    CUTE_UNROLL
    for (int i = 0; i < kSlots; ++i) offsets[i] = slot_offset(tensor, slots[i]) * kElementBytes;
    auto copy_all = [&](auto whole) {
      const auto* head = static_cast<const unsigned char*>(tensor.data) +
                         item.kv_head * tensor.stride_head * kElementBytes + lane_byte();
      CUTE_UNROLL
      for (int pass = 0; pass < kRows / kRowsAtOnce; ++pass) {
        const int row = pass * kRowsAtOnce + lane_row();
        const unsigned char* source =
            head + __shfl_sync(0xffffffffu, offsets[pass * kRowsAtOnce / 32], row % 32);
        CUTE_UNROLL
        for (int piece = 0; piece < kPieces; ++piece) {
          const int byte = piece * kLanes * kCopyBytes;
          copy_piece<whole, kOnce>(item, first_key + first_row + row,
                                   row_bytes - lane_byte() - byte, place(pass, piece),
                                   source + byte);
        }
      }
    };
    if (first_key >= item.keys.begin && first_key + Traits::kTileN <= item.keys.end &&
        row_bytes >= kRowBytes) {
      copy_all(C<true>{});
    } else {
      copy_all(C<false>{});
    }
  }
};

// The places of rows in a swizzled tile, where 8 lanes share a row. A pass covers 4 of the 8 rows
// that the swizzle tells apart: even and odd passes differ.
template <int kTileRows>
struct TilePlaces {
  std::uint32_t of_parity[2];

  CUTE_DEVICE TilePlaces(const void* tile, int first_row) {
    const int row = first_row + lane_id() / 8;
    const std::uint32_t begin = cute::cast_smem_ptr_to_uint(tile) + row * kBlockRowBytes;
    of_parity[0] = begin + (lane_id() % 8 ^ row % 8) * kCopyBytes;
    of_parity[1] = begin + (lane_id() % 8 ^ (row + 4) % 8) * kCopyBytes;
  }
  CUTE_DEVICE std::uint32_t operator()(int pass, int block) const {
    return of_parity[pass % 2] + (pass * 4 + block * kTileRows) * kBlockRowBytes;
  }
};

// Announces the warp's part of a tile or slice, and goes on to the next.
CUTE_DEVICE void publish_rows(auto& write) {
  order_memory_accesses();
  publish_writes(write.full());
  write.next.advance();
}

// Each of kWarps producer warps copies a share of the rows of both operands, eight lanes 128 bytes
// of a row.
template <class Traits, class WriterK, class WriterV, int kWarps = kWarpgroupWarps>
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
  CUTE_DEVICE void publish() {
    if (unpublished == nullptr) return;
    publish_writes(*unpublished);
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
