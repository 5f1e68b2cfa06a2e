// Helpers that all cp.async loads share, with and without conversion.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

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
// NOTE: the warp writes through the generic proxy and wgmma reads through the async one. No lane's
// next copy may overwrite what another lane still reads.
CUTE_DEVICE void publish_rows(auto& write) {
  order_memory_accesses();
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  release(write.full());
  write.next.advance();
}

}  // namespace preflash::sm90
