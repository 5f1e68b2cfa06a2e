// Loads of K and V that are transformed on arrival: cp.async gathers rows as they are stored into
// the raw ring, whatever the layout, and the warps that copied them write them to their tiles,
// widened and rotated (forward_transform.cuh). V of 16 bits goes to its tile at once.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm80.hpp>

#include "kernels/sm90/forward_transform.cuh"

namespace preflash::sm90 {

// All producer warps copy and transform the tiles of both operands. A warp has its share of the
// rows for itself, so it waits for nobody's copies but its own.
template <class Traits>
struct TransformLoader {
  static constexpr int kWarpKeys = Traits::kTileN / Traits::kProducerWarps;
  static_assert(kWarpKeys <= 32, "a lane looks up the page of one row");
  static constexpr int kPieceBytes = 16;  // of one copy

  const HopperSegment& params;
  SharedStorage<Traits>& smem;
  ItemKeys item;
  ProducerPipelineState<Traits::kStages> k_write;
  ProducerPipelineState<Traits::kStages> v_write;

  __device__ __forceinline__ TransformLoader(const HopperSegment& params,
                                             SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  // Publishes K(last), then K(t - 1) and V(t) for each tile, in the order in which the consumers
  // need them. Copies run a tile ahead of that in each operand, lookups of pages two. Every copy is
  // a group, an empty one too where there is no tile, so that one group may always be in flight.
  template <class Tiles, class AfterFirst>
  __device__ __forceinline__ void load_item(const ItemState& state, Tiles& tiles,
                                            const AfterFirst& after_first) {
    item = ItemKeys::of(state);
    int tile = tiles.first(state);
    KeySlot slot = find_slot_of_lane(tile);
    int next = tiles.next();
    KeySlot next_slot = find_slot_of_lane(next);
    copy_k(slot, tile);
    cp_async_fence();
    after_first();
    // The iteration behind the last tile publishes the last V.
#pragma unroll 1
    for (bool is_first = true, is_last = false; !is_last; is_first = false) {
      const int ahead = tiles.next();
      KeySlot ahead_slot = find_slot_of_lane(ahead);
      is_last = tile == kNoTile;
      if (is_last) {
        cp_async_fence();
      } else {
        publish_k(tile, [&] { copy_k(next_slot, next); });
      }
      auto copy_next = [&] { copy_v(slot, tile); };
      if (is_first) {
        copy_next();
      } else {
        publish_v(copy_next);
      }
      tile = next;
      slot = next_slot;
      next = ahead;
      next_slot = ahead_slot;
    }
  }

 private:
  __device__ __forceinline__ static int first_row() { return threadIdx.x / 32 * kWarpKeys; }
  __device__ __forceinline__ bool stored_in_8_bits() const {
    return Traits::kWidens && size_of(params.kv_dtype) == 1;
  }
  __device__ __forceinline__ unsigned char* raw_k() const { return smem.raw; }
  // NOTE: in 16 bits K takes the ring for itself.
  __device__ __forceinline__ unsigned char* raw_v() const {
    return smem.raw + Traits::kTileN * Traits::kHeadQk;
  }
  __device__ __forceinline__ unsigned char* k_tile() const {
    return reinterpret_cast<unsigned char*>(smem.k +
                                            k_write.index() * (Traits::kTileN * Traits::kHeadQk));
  }
  __device__ __forceinline__ unsigned char* v_tile() const {
    return reinterpret_cast<unsigned char*>(smem.v +
                                            v_write.index() * (Traits::kTileN * Traits::kHeadVo));
  }

  // Of row lane_id() of the warp's. A row outside the item's keys gets the slot of a row inside:
  // its address is valid, and nothing is read from it.
  __device__ __forceinline__ KeySlot find_slot_of_lane(int tile) const {
    int key = tile * Traits::kTileN + first_row() + lane_id();
    return find_slot(params, item.kv_begin, max(min(key, item.keys.end - 1), item.keys.begin));
  }

  __device__ __forceinline__ void copy_k(KeySlot slot, int tile) const {
    if (tile != kNoTile) {
      if (stored_in_8_bits()) {
        copy_rows<Traits::kHeadQk, 1, Place::kRaw>(slot, tile, params.k, params.head_dim_qk,
                                                   raw_k());
      } else {
        copy_rows<Traits::kHeadQk, 2, Place::kRaw>(slot, tile, params.k, params.head_dim_qk,
                                                   raw_k());
      }
    }
    cp_async_fence();
  }
  __device__ __forceinline__ void copy_v(KeySlot slot, int tile) const {
    if (tile != kNoTile) {
      if (stored_in_8_bits()) {
        copy_rows<Traits::kHeadVo, 1, Place::kRaw>(slot, tile, params.v, params.head_dim_vo,
                                                   raw_v());
      } else {
        smem.barriers.v_empty[v_write.index()].wait(v_write.phase() ^ 1);
        copy_rows<Traits::kHeadVo, 2, Place::kTile>(slot, tile, params.v, params.head_dim_vo,
                                                    v_tile());
      }
    }
    cp_async_fence();
  }

  // Waits until all of the warp's groups but the last one have arrived.
  __device__ __forceinline__ static void await_rows() {
    cp_async_wait<1>();
    __syncwarp();
  }
  // NOTE: the warp writes through the generic proxy and wgmma reads through the async one. Nor may
  // a lane's next copy overwrite what another one still reads.
  __device__ __forceinline__ static void announce(TransactionBarrier& full) {
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane_id() == 0) full.arrive();
  }

  // Publish a tile, and call copy_next() as soon as its part of the raw ring is free.
  template <class CopyNext>
  __device__ __forceinline__ void publish_k(int tile, const CopyNext& copy_next) {
    await_rows();
    RowTransform<Traits> rows{raw_k(), first_row()};
    auto await_tile = [&] { smem.barriers.k_empty[k_write.index()].wait(k_write.phase() ^ 1); };
    const bool rotates = !stored_in_8_bits() || params.position == Position::kRope;
    if (rotates) {
      await_tile();
      rotate_rows(rows, tile * Traits::kTileN);
    } else {
      widen_rows<Traits::kHeadQk>(rows, k_tile(), await_tile, copy_next);
    }
    announce(smem.barriers.k_full[k_write.index()]);
    k_write.advance();
    if (rotates) copy_next();
  }
  __device__ __forceinline__ void rotate_rows(const RowTransform<Traits>& rows,
                                              int first_key) const {
    constexpr DType kE4M3 = DType::kFloat8E4M3, kE5M2 = DType::kFloat8E5M2;
    const int head_dim = params.head_dim_qk;
    if (!stored_in_8_bits()) {
      rows.template rotate<Traits::kVariant.kv_dtype>(smem, first_key, head_dim, k_tile());
    } else if (params.kv_dtype == kE4M3) {
      rows.template rotate<kE4M3>(smem, first_key, head_dim, k_tile());
    } else {
      rows.template rotate<kE5M2>(smem, first_key, head_dim, k_tile());
    }
  }
  template <class CopyNext>
  __device__ __forceinline__ void publish_v(const CopyNext& copy_next) {
    await_rows();
    if (!stored_in_8_bits()) {
      announce(smem.barriers.v_full[v_write.index()]);
      v_write.advance();
      copy_next();
      return;
    }
    RowTransform<Traits> rows{raw_v(), first_row()};
    auto await_tile = [&] { smem.barriers.v_empty[v_write.index()].wait(v_write.phase() ^ 1); };
    widen_rows<Traits::kHeadVo>(rows, v_tile(), await_tile, copy_next);
    announce(smem.barriers.v_full[v_write.index()]);
    v_write.advance();
  }

  template <int kHead, class AwaitTile, class CopyNext>
  __device__ __forceinline__ void widen_rows(const RowTransform<Traits>& rows, unsigned char* tile,
                                             const AwaitTile& await_tile,
                                             const CopyNext& copy_next) const {
    auto narrow = rows.template read<kHead>();
    __syncwarp();
    copy_next();
    await_tile();
    if (params.kv_dtype == DType::kFloat8E4M3) {
      rows.template write<DType::kFloat8E4M3, kHead>(narrow, tile);
    } else {
      rows.template write<DType::kFloat8E5M2, kHead>(narrow, tile);
    }
  }

  enum class Place { kRaw, kTile };
  enum class Rows { kWhole, kPartial };  // whether all are there, with all of their columns

  // Copies the warp's rows of a tile. What is no kept key's, or past head_dim, becomes zeros.
  template <int kHead, int kElementBytes, Place kPlace>
  __device__ __forceinline__ void copy_rows(KeySlot slot, int tile, const KvTensor& tensor,
                                            int head_dim, unsigned char* target) const {
    int first_key = tile * Traits::kTileN;
    bool whole = first_key >= item.keys.begin && first_key + Traits::kTileN <= item.keys.end &&
                 head_dim == kHead;
    if (whole) {
      copy_rows<kHead, kElementBytes, kPlace, Rows::kWhole>(slot, first_key, tensor, head_dim,
                                                            target);
    } else {
      copy_rows<kHead, kElementBytes, kPlace, Rows::kPartial>(slot, first_key, tensor, head_dim,
                                                              target);
    }
  }
  template <int kHead, int kElementBytes, Place kPlace, Rows kRows>
  __device__ __forceinline__ void copy_rows(KeySlot slot, int first_key, const KvTensor& tensor,
                                            int head_dim, unsigned char* target) const {
    constexpr int kRowBytes = kHead * kElementBytes;
    constexpr int kPieces = kRowBytes / kPieceBytes;
    constexpr int kLanes = kPieces % 8 == 0 ? 8 : 4;  // for one row
    constexpr int kRowsAtOnce = 32 / kLanes;
    static_assert(kPieces % kLanes == 0 && kWarpKeys % kRowsAtOnce == 0);
    int lane_byte = lane_id() % kLanes * kPieceBytes;
    const auto* head = static_cast<const unsigned char*>(tensor.data) +
                       item.kv_head * tensor.stride_head * kElementBytes + lane_byte;
    std::int64_t lane_offset = slot_offset(tensor, slot) * kElementBytes;
    CUTE_UNROLL
    for (int pass = 0; pass < kWarpKeys / kRowsAtOnce; ++pass) {
      int warp_row = pass * kRowsAtOnce + lane_id() / kLanes;
      const unsigned char* source = head + __shfl_sync(0xffffffffu, lane_offset, warp_row);
      int row = first_row() + warp_row;
      int key = first_key + row;
      int bytes_left = key >= item.keys.begin && key < item.keys.end ? head_dim * kElementBytes : 0;
      CUTE_UNROLL
      for (int i = 0; i < kPieces / kLanes; ++i) {
        int byte = i * kLanes * kPieceBytes;
        int place = kPlace == Place::kRaw ? row * kRowBytes + lane_byte + byte
                                          : swizzled<Traits::kTileN>(row, (lane_byte + byte) / 2);
        if constexpr (kRows == Rows::kWhole) {
          copy_piece(target + place, source + byte);
        } else {
          copy_piece(target + place, source + byte,
                     min(max(bytes_left - lane_byte - byte, 0), kPieceBytes));
        }
      }
    }
  }
  __device__ __forceinline__ static void copy_piece(unsigned char* target,
                                                    const unsigned char* source) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(cast_smem_ptr_to_uint(target)),
        "l"(source)
        : "memory");
  }
  // NOTE: with 0 source bytes nothing is read; the address need not be mapped.
  __device__ __forceinline__ static void copy_piece(unsigned char* target,
                                                    const unsigned char* source, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                     cast_smem_ptr_to_uint(target)),
                 "l"(source), "r"(bytes)
                 : "memory");
  }
};

}  // namespace preflash::sm90
