// What loads by cp.async have in common, of rows as they are and of rows that are converted.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm80.hpp>

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

namespace preflash::sm90 {

// A row outside the item's keys gets the slot of a row inside: its address is valid, and nothing is
// read from it.
__device__ __forceinline__ KeySlot find_slot_within(const HopperSegment& params,
                                                    const ItemKeys& item, int key) {
  return find_slot(params, item.kv_begin, max(min(key, item.keys.end - 1), item.keys.begin));
}

enum class Rows { kWhole, kPartial };  // whether all are there, with all of their columns

// Calls copy(rows) with a constant that says which rows those of a tile are.
template <class Traits, class Copy>
__device__ __forceinline__ void copy_tile(const ItemKeys& item, int first_key, bool all_columns,
                                          const Copy& copy) {
  if (first_key >= item.keys.begin && first_key + Traits::kTileN <= item.keys.end && all_columns) {
    copy(C<Rows::kWhole>{});
  } else {
    copy(C<Rows::kPartial>{});
  }
}

inline constexpr int kCopyBytes = 16;

__device__ __forceinline__ void copy_piece(std::uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(target), "l"(source)
               : "memory");
}
// The first `bytes`; the others become zeros.
// With 0 source bytes nothing is read; the address need not be mapped.
__device__ __forceinline__ void copy_piece(std::uint32_t target, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source),
               "r"(bytes)
               : "memory");
}
// A piece of a key's row, with `bytes_left` up to head_dim. Rows of no key, and columns past
// head_dim, become zeros.
template <Rows kRows>
__device__ __forceinline__ void copy_piece_of(const ItemKeys& item, int key, int bytes_left,
                                              std::uint32_t target, const void* source) {
  if constexpr (kRows == Rows::kWhole) {
    copy_piece(target, source);
  } else {
    const bool kept = key >= item.keys.begin && key < item.keys.end;
    copy_piece(target, source, kept ? min(max(bytes_left, 0), kCopyBytes) : 0);
  }
}

// Announces what a warp has written to a tile or slice, and goes on to the next.
// NOTE: the warp writes through the generic proxy and wgmma reads through the async one. Nor may a
// lane's next copy overwrite what another one still reads.
template <class Writer>
__device__ __forceinline__ void publish_rows(Writer& write) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (lane_id() == 0) write.full().arrive();
  write.next.advance();
}

}  // namespace preflash::sm90
