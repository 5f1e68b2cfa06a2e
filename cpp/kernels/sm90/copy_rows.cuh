// What all cp.async loads share, with and without conversion.
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

enum class Rows { kWhole, kPartial };  // all rows and columns of the tile exist

// Calls copy(rows) with a constant that says which rows those of a tile are.
template <class Traits, class Copy>
CUTE_DEVICE void copy_tile(const ItemKeys& item, int first_key, bool all_columns,
                           const Copy& copy) {
  if (first_key >= item.keys.begin && first_key + Traits::kTileN <= item.keys.end && all_columns) {
    copy(C<Rows::kWhole>{});
  } else {
    copy(C<Rows::kPartial>{});
  }
}

inline constexpr int kCopyBytes = 16;

// Copies a piece of a key's row, with `bytes_left` up to head_dim. Rows of no key, and columns past
// head_dim, become zeros: with 0 bytes nothing is read, so the address need not be mapped.
template <Rows kRows>
CUTE_DEVICE void copy_piece(const ItemKeys& item, int key, int bytes_left, std::uint32_t target,
                            const void* source) {
  if constexpr (kRows == Rows::kWhole) {
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
