// K and V row by row, by cp.async: for page sizes that TMA's swizzle cannot serve, page 1 above
// all.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/arch/copy_sm80.hpp>

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"

namespace preflash::sm90 {

// Both operands' tiles row by row, by all threads of the warpgroup: each warp a quarter of the
// rows, eight lanes the 128 bytes of one row's 64-column block.
template <class Traits>
struct RowLoader {
  using Element = typename Traits::Element;
  static constexpr int kWarpKeys = Traits::kTileN / kWarpgroupWarps;
  static constexpr int kOwned = ceil_div(kWarpKeys, 32);  // rows that a lane looks up
  static constexpr int kRowsPerPass = 4;
  static constexpr int kPasses = kWarpKeys / kRowsPerPass;
  static_assert(kWarpKeys % kRowsPerPass == 0);
  static constexpr int kElementsPerCopy = 16 / sizeof(Element);

  enum class Fill { kWhole, kPartial };  // whether every row and column of a tile is there

  // Rows i * 32 + lane_id() of the warp's share. Looked up early and put to use late: the page
  // index takes a trip to L2.
  struct Places {
    KeySlot slot[kOwned];
  };

  const HopperParams& params;
  SharedStorage<Traits>& smem;
  ItemKeys item;
  ProducerRing<Traits::kStages> k;
  ProducerRing<Traits::kStages> v;
  BytesBarrier* unpublished = nullptr;  // its rows are in flight

  __device__ __forceinline__ RowLoader(const HopperParams& params, SharedStorage<Traits>& smem)
      : params(params), smem(smem) {}

  // K(last), then K(t - 1), V(t) for each tile: the order in which S(t - 1) = Q K^T runs ahead of
  // O += P V(t). Pages are looked up two tiles ahead. Calls after_first() when K(last) is on its
  // way.
  template <class AfterFirst>
  __device__ __forceinline__ void load_item(const ItemState& state, AfterFirst&& after_first) {
    item = ItemKeys::of(state);
    const int begin = warp_uniform(state.tiles.begin);
    const int first = warp_uniform(state.tiles.end) - 1;
    Places places = find(first);
    Places next = find(first - 1);
    fetch_k(places, first);
    after_first();
    for (int tile = first; tile > begin; --tile) {
      Places ahead = find(tile - 2);
      fetch_k(next, tile - 1);
      fetch_v(places, tile);
      places = next;
      next = ahead;
    }
    fetch_v(places, begin);
  }

  __device__ __forceinline__ void drain() {
    cp_async_wait<0>();
    publish();
  }

 private:
  __device__ __forceinline__ static int warp_row() { return threadIdx.x / 32 * kWarpKeys; }

  // Of rows that are there; others get the place of one that is.
  __device__ __forceinline__ Places find(int tile) const {
    Places places;
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) {
      int key = tile * Traits::kTileN + warp_row() + i * 32 + lane_id();
      places.slot[i] =
          find_slot(params, item.kv_begin, max(min(key, item.keys.end - 1), item.keys.begin));
    }
    return places;
  }

  __device__ __forceinline__ void fetch_k(const Places& places, int tile) {
    smem.barriers.k_empty[k.index()].wait(k.phase() ^ 1);
    fetch<Traits::kBlocksQk>(places, tile, params.k, params.head_dim_qk,
                             smem.k + k.index() * (Traits::kTileN * Traits::kHeadQk));
    publish_before(smem.barriers.k_full[k.index()]);
    k.advance();
  }
  __device__ __forceinline__ void fetch_v(const Places& places, int tile) {
    smem.barriers.v_empty[v.index()].wait(v.phase() ^ 1);
    fetch<Traits::kBlocksVo>(places, tile, params.v, params.head_dim_vo,
                             smem.v + v.index() * (Traits::kTileN * Traits::kHeadVo));
    publish_before(smem.barriers.v_full[v.index()]);
    v.advance();
  }

  // One tile stays in flight while the one before it is announced.
  __device__ __forceinline__ void publish_before(BytesBarrier& full) {
    cp_async_fence();
    cp_async_wait<1>();
    publish();
    unpublished = &full;
  }
  // NOTE: cp.async writes through the generic proxy and wgmma reads through the async one.
  __device__ __forceinline__ void publish() {
    if (unpublished == nullptr) return;
    cutlass::arch::fence_view_async_shared();
    unpublished->arrive();
    unpublished = nullptr;
  }

  template <int kBlocks>
  __device__ __forceinline__ void fetch(const Places& places, int tile, const KvTensor& tensor,
                                        int head_dim, Element* target) const {
    std::int64_t offsets[kOwned];
    CUTE_UNROLL
    for (int i = 0; i < kOwned; ++i) offsets[i] = slot_offset(tensor, places.slot[i]);
    int key = tile * Traits::kTileN;
    bool whole = key >= item.keys.begin && key + Traits::kTileN <= item.keys.end &&
                 head_dim == kBlocks * kBlockColumns;
    if (whole) {
      copy_rows<kBlocks, Fill::kWhole>(offsets, key, tensor, head_dim, target);
    } else {
      copy_rows<kBlocks, Fill::kPartial>(offsets, key, tensor, head_dim, target);
    }
  }

  template <int kBlocks, Fill kFill>
  __device__ __forceinline__ void copy_rows(const std::int64_t (&offsets)[kOwned], int tile_key,
                                            const KvTensor& tensor, int head_dim,
                                            Element* tile) const {
    constexpr int kPassesPerOwned = 32 / kRowsPerPass;
    int column = lane_id() % 8 * kElementsPerCopy;
    int lane_row = lane_id() / 8;
    auto* head =
        static_cast<const Element*>(tensor.data) + item.kv_head * tensor.stride_head + column;
    // The swizzle moves a 16-byte piece by its row modulo 8: two kinds of pass, 4 rows apart.
    int row = warp_row() + lane_row;
    std::uint32_t rows = cast_smem_ptr_to_uint(tile) + row * kBlockRowBytes;
    std::uint32_t targets[2] = {rows + (lane_id() % 8 ^ row % 8) * 16,
                                rows + (lane_id() % 8 ^ (row + kRowsPerPass) % 8) * 16};
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      std::int64_t offset = __shfl_sync(0xffffffffu, offsets[pass / kPassesPerOwned],
                                        pass % kPassesPerOwned * kRowsPerPass + lane_row);
      const Element* source = head + offset;
      std::uint32_t target = targets[pass % 2] + pass * kRowsPerPass * kBlockRowBytes;
      int key = tile_key + row + pass * kRowsPerPass;
      CUTE_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        std::uint32_t block_target = target + block * Traits::kTileN * kBlockRowBytes;
        const Element* block_source = source + block * kBlockColumns;
        if constexpr (kFill == Fill::kWhole) {
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(block_target),
                       "l"(block_source)
                       : "memory");
        } else {
          // NOTE: with 0 source bytes nothing is read; the address need not be mapped.
          bool kept = key >= item.keys.begin && key < item.keys.end;
          int bytes = kept && block * kBlockColumns + column < head_dim ? 16 : 0;
          asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(block_target),
                       "l"(block_source), "r"(bytes)
                       : "memory");
        }
      }
    }
  }
};

}  // namespace preflash::sm90
