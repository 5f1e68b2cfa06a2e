// Compile-time shape of one fa3 kernel: roles, tiles, shared memory, barriers. One type parameter:
// the variant's generated type, which carries kVariant and kTile. README.md beside this file tells
// how the pieces play together.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

#include "kernels/common/element.cuh"
#include "preflash/mask_range.h"
#include "preflash/variant.h"

namespace preflash::sm90 {

using namespace cute;

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = 4;
inline constexpr int kWarpgroupRows = 64;  // of one wgmma
inline constexpr int kWarpRows = 16;       // of one warp's part of it
inline constexpr int kBlockColumns = 64;   // 128 bytes: one swizzle atom, one TMA box
inline constexpr int kBlockRowBytes = 128;
inline constexpr int kMostConsumers = 4;
inline constexpr int kMostSharedBytes = 227 * 1024;  // of one CTA
inline constexpr int kOtherBytes = 2048;             // barriers, items

template <class V>
struct ForwardTraits {
  static constexpr Variant kVariant = V::kVariant;
  static constexpr TileShape kTile = V::kTile;
  static_assert(kVariant.q_dtype == kVariant.kv_dtype, "fa3 computes in one 16-bit dtype");
  static_assert(kVariant.mask == Mask::kBounds, "custom masks run on fa2");

  using Element = preflash::Element<kVariant.q_dtype>;
  static constexpr int kTileM = kTile.m;
  static constexpr int kTileN = kTile.n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kHeadQk = kVariant.head_dim_qk;
  static constexpr int kHeadVo = kVariant.head_dim_vo;

  // Warpgroup 0 produces, the others consume 64 rows of the tile each.
  static constexpr int kConsumers = kTileM / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kThreads = kConsumerThreads + kWarpgroupThreads;
  static_assert(kTileM % kWarpgroupRows == 0 && kTile.warps * 32 == kThreads);
  static_assert(kConsumers == 2 || kConsumers == kMostConsumers);
  static_assert(kHeadQk % kBlockColumns == 0 && kHeadVo % kBlockColumns == 0);
  static_assert(kTileN % 16 == 0 && kTileN <= 256);
  static constexpr int kMostBoxes = kTileN / 8;  // of a K or V tile: 8 rows are the least

  // Whether a warpgroup passes tiles by that none of its rows touches, as a causal item's upper
  // rows do not touch its last tiles: only a tile of few keys may be one warpgroup's alone.
  static constexpr bool kSkipsTiles = kTileN <= kWarpgroupRows;
  // It may pass as many tiles by as V has other buffers, and still run its first S beside the last
  // product of the item before: the others run ahead with V meanwhile.
  static_assert(!kSkipsTiles || (kConsumers - 1) * kWarpgroupRows <= (kStages - 1) * kTileN);

  // Q of the next item arrives under this one's last tiles; with one buffer, only under the last.
  static constexpr int kBytesWithoutQ =
      kStages * kTileN * (kHeadQk + kHeadVo) * 2 + kConsumerWarps * kWarpRows * kBlockColumns * 2;
  static constexpr int kQStages =
      2 * kTileM * kHeadQk * 2 + kBytesWithoutQ + kOtherBytes <= kMostSharedBytes ? 2 : 1;

  // In which step of an item a warpgroup reads what comes after it (measured: README).
  static constexpr bool kLooksInLastStep = !kSkipsTiles;

  // setmaxnreg: the launch bounds hand the 65536 registers out evenly, in eights; what the
  // producers give back is the consumers'.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kTile.ctas_per_sm) / 8 * 8;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 112 : kHeadVo <= 128 ? 224 : 232;
  static constexpr int kProducerRegisters =
      (kLaunchRegisters * (kConsumers + 1) - kConsumers * kConsumerRegisters) / 8 * 8;
  static_assert(kProducerRegisters >= 32);

  // S = Q K^T from shared memory; O += P V with P in registers and V as it lies, rows of keys.
  using MmaQk = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kTileN>, Int<kHeadQk>>>()));
  using MmaPv = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<_64, Int<kHeadVo>, Int<kTileN>>,
                           GMMA::Major::K, GMMA::Major::MN>()));

  // Columns in blocks of 64, each block all rows of the tile: what TMA boxes of 64 columns write.
  using AtomK = GMMA::Layout_K_SW128_Atom<Element>;
  using AtomMn = GMMA::Layout_MN_SW128_Atom<Element>;
  using LayoutQ =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kTileM>, Int<kHeadQk>, Int<kQStages>>{}));
  using LayoutK =
      decltype(tile_to_shape(AtomK{}, Shape<Int<kTileN>, Int<kHeadQk>, Int<kStages>>{}));
  using LayoutV = decltype(tile_to_shape(AtomMn{}, Shape<Int<kHeadVo>, Int<kTileN>, Int<kStages>>{},
                                         Step<_2, _1, _3>{}));  // V^T: (d_vo, tile_n, stages)

  static constexpr int kBlocksQk = kHeadQk / kBlockColumns;
  static constexpr int kBlocksVo = kHeadVo / kBlockColumns;
};

// A work item as everybody needs it; worked out by one producer warp, items ahead, and read from
// shared memory when it is needed, so that it costs no registers in the loops. One without tiles
// says that the CTA has no more.
struct ItemState {
  WorkItem item;
  RequestInfo request;
  TileRange tiles;
  KeySpan keys;  // from the first one that any row keeps to the request's end
  int num_rows;  // of the tile; the rest of it is stale
  // What the rows of each consumer warpgroup touch of `tiles`: at least one tile.
  TileRange warpgroup_tiles[kMostConsumers];
};

// Where a loader finds an item's keys, kept in registers: it asks for every tile.
struct ItemKeys {
  int kv_begin;
  KeySpan keys;
  int kv_head;

  __device__ __forceinline__ static ItemKeys of(const ItemState& state) {
    return {state.request.kv_begin, state.keys, state.item.kv_head};
  }
};

using Barrier = cutlass::arch::ClusterBarrier;
using BytesBarrier = cutlass::arch::ClusterTransactionBarrier;

inline constexpr int kItemSlots = 4;

// Named by the event they announce. Arrivals: "full" barriers one producer thread (and the bytes of
// its TMA), but k_full and v_full every producer thread where the producers gather rows; "empty"
// barriers of what only the tensor core has read one lane of each consumer warp; item_empty every
// thread that has read the item, in the consumers and in the loading warps.
template <int kQStages, int kStages>
struct Barriers {
  BytesBarrier q_full[kQStages];
  Barrier q_empty[kQStages];
  BytesBarrier k_full[kStages];
  Barrier k_empty[kStages];
  BytesBarrier v_full[kStages];
  Barrier v_empty[kStages];
  Barrier item_full[kItemSlots];
  Barrier item_empty[kItemSlots];
};

// Hardware barriers among consumers. kTurn + w: warpgroup w may issue its products.
struct NamedBarriers {
  static constexpr int kTurn = 0;
  static constexpr int kWarpgroup = kMostConsumers;  // + w
  static constexpr int kReserved = 8;                // CUTLASS's own come first
  static_assert(kReserved + kWarpgroup + kMostConsumers <= 16);
};

// Where a TMA box of K or V begins (tensor_map.h).
struct alignas(16) BoxPlace {
  int page;
  int x;
  int r;
};

template <class Traits>
struct SharedStorage {
  using Element = typename Traits::Element;
  alignas(1024) Element q[cosize_v<typename Traits::LayoutQ>];
  alignas(1024) Element k[cosize_v<typename Traits::LayoutK>];
  alignas(1024) Element v[cosize_v<typename Traits::LayoutV>];
  // Each warp's 16 rows of O leave through its own bytes, 64 columns at a time.
  alignas(1024) Element o[Traits::kConsumerWarps][kWarpRows * kBlockColumns];
  ItemState items[kItemSlots];
  BoxPlace k_places[Traits::kMostBoxes];  // of the tile whose boxes are being issued
  BoxPlace v_places[Traits::kMostBoxes];
  Barriers<Traits::kQStages, Traits::kStages> barriers;
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

// NOTE: to the compiler CUTLASS's barriers and fences touch no memory; ordinary accesses must not
// cross them.
__device__ __forceinline__ void order_memory_accesses() { asm volatile("" ::: "memory"); }

// A value that all lanes hold alike, told to the compiler: loops and addresses that depend on it
// stay in uniform registers.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// Position in a ring of buffers. A consumer waits for `phase`; a producer, whose first lap finds
// the buffers empty, for `phase ^ 1`. In two forms: the consumers' loop is shorter with both parts
// at hand, the producers have few registers.
template <int kSize>
struct ConsumerRing {
  int buffer = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ int index() const { return buffer; }
  __device__ __forceinline__ std::uint32_t phase() const { return parity; }
  __device__ __forceinline__ void advance() {
    if (++buffer == kSize) {
      buffer = 0;
      parity ^= 1;
    }
  }
};

template <int kSize>
struct ProducerRing {
  static_assert((kSize & (kSize - 1)) == 0);
  std::uint32_t count = 0;

  __device__ __forceinline__ int index() const { return count % kSize; }
  __device__ __forceinline__ std::uint32_t phase() const { return count / kSize % 2; }
  __device__ __forceinline__ void advance() { ++count; }
};

}  // namespace preflash::sm90
