// Shared memory of a CTA: items, operands, barriers, and the state of their pipelines.
#pragma once

#include <cutlass/arch/barrier.h>

#include "kernels/common/rotary.cuh"
#include "kernels/sm90/forward_traits.cuh"
#include "preflash/mask_range.h"
#include "preflash/plan.h"

namespace preflash::sm90 {

// A work item in shared memory, where it costs no registers in loops. One producer warp prepares
// it, items ahead. An item without tiles ends the CTA's work list.
struct ItemState {
  WorkItem item;
  RequestInfo request;
  TileRange tiles;
  KeySpan keys;  // from the first key that any row keeps to the request's end
  int num_rows;  // rows of the tile in use; the others hold stale data
  // The part of `tiles` that the rows of each consumer warpgroup touch: at least one tile.
  TileRange warpgroup_tiles[kMaxConsumers];
  bool begins_late;  // of an aligned query tile (work_items.cuh)
#ifdef PREFLASH_TRACE
  int record;  // of ForwardParams::records
#endif
};

// Location of an item's keys; a loader has it in registers, because every tile needs it.
struct ItemKeys {
  int kv_begin;
  KeySpan keys;
  int kv_head;
  int segment;

  CUTE_DEVICE static ItemKeys of(const ItemState& state) {
    return {state.request.kv_begin, state.keys, state.item.kv_head, state.request.segment};
  }
};

using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

inline constexpr int kItemSlots = 4;

// The barriers of a ring of buffers, named by the event that they announce. README.md ("Barriers
// and phases") says who arrives.
template <int kSlots, class Full = TransactionBarrier>
struct Ring {
  Full full[kSlots];
  Barrier empty[kSlots];

  CUTE_DEVICE void init(int arrivals_at_full, int arrivals_at_empty) {
    for (int i = 0; i < kSlots; ++i) {
      full[i].init(arrivals_at_full);
      empty[i].init(arrivals_at_empty);
    }
  }
};

// Hardware barriers among the consumer warpgroups w.
struct NamedBarriers {
  static constexpr int kOrder = 0;                  // + w: warpgroup w may issue its products
  static constexpr int kWarpgroup = kMaxConsumers;  // + w: the threads of warpgroup w
  static constexpr int kReserved = 8;               // CUTLASS's own come first
  static_assert(kReserved + kWarpgroup + kMaxConsumers <= 16);
};

// A KV tile of which a custom mask keeps something, in one word of shared memory and one register.
struct MaskTile {
  enum Flags { kLast = 1, kFull = 2 };

  int word = 0;

  CUTE_DEVICE int index() const { return word / 4; }
  CUTE_DEVICE bool is_last() const { return word & kLast; }  // of its item
  CUTE_DEVICE bool is_full() const { return word & kFull; }  // all rows keep all
};

template <class Traits>
struct MaskTileSlots {
  MaskTile tiles[Traits::kTileSlots];
  Ring<Traits::kTileSlots, Barrier> ring;
};

struct Nothing {};

// The coordinates at which a TMA box of K or V begins (cuda/tma/tensor_map.h).
struct alignas(16) TmaCoordinates {
  int page;
  int x;
  int r;
};

template <class Traits>
struct RotaryTables {
  std::uint64_t frequency[Traits::kPairs];  // RotaryFrequencies
  Rotation row_step[Traits::kPairs];        // from a key to the next that the same lane rotates
};

// State of kernels with raw tiles or slices (load_converted.cuh).
template <class Traits>
struct ConversionState {
  Ring<2> ring;                       // of the raw tiles of K and of V, or of raw slices
  float query_scale[Traits::kTileM];  // of each row's scores, where Q is narrowed
};

template <class Traits, bool kConverts = Traits::kConverts, bool kSliced = Traits::kSliced>
struct ConversionStorage {};
template <class Traits>
struct ConversionStorage<Traits, true, false> {
  alignas(1024) unsigned char raw[Traits::kRawBytes];
  ConversionState<Traits> conversion;
  RotaryTables<Traits> tables;

  CUTE_DEVICE RotaryTables<Traits>& rotary() { return tables; }
};
// The state is elsewhere (SliceState): after the raw slices it would take 1 KiB.
template <class Traits>
struct ConversionStorage<Traits, true, true> {
  alignas(1024) unsigned char raw[Traits::kRawBytes];

  // Returns the tables, in place of raw slices, which launches with RoPE do not have.
  CUTE_DEVICE RotaryTables<Traits>& rotary() {
    static_assert(sizeof(RotaryTables<Traits>) <= Traits::kRawBytes);
    return *reinterpret_cast<RotaryTables<Traits>*>(raw);
  }
};

// K and V: whole tiles of each, or slices of both in the order of use, K(0), K(1), V(0), K(2), ...
template <class Traits, bool kSliced = Traits::kSliced>
struct KvBuffers {
  alignas(1024) typename Traits::ElementKv k[cosize_v<typename Traits::LayoutK>];
  alignas(1024) typename Traits::ElementKv v[cosize_v<typename Traits::LayoutV>];
};
template <class Traits>
struct KvBuffers<Traits, true> {
  alignas(1024) typename Traits::ElementKv slices[Traits::kSliceSlots][Traits::kSliceElements];
};
// Barriers and rows of the warps' mailboxes for P of the other CTA's keys (PairedMma).
template <class Traits>
struct PairState {
  // full: a message is in this warp's mailbox. empty: the other CTA's warp has read its own.
  Ring<Traits::kConsumerWarps> p;
  float4 rows[Traits::kConsumerWarps][8];  // references and sums of each quad's two rows
};
template <class Traits>
struct SliceState {
  Ring<Traits::kSliceSlots> ring;
  conditional_t<(Traits::kClusterSize > 1), PairState<Traits>, Nothing> pair;
  conditional_t<Traits::kConverts, ConversionState<Traits>, Nothing> conversion;
};

// V as it arrives where it is transposed, and sums of O in float32 (eight_bit.cuh).
template <class Traits, bool kTransposesV = Traits::kTransposesV>
struct TransposeStorage {};
template <class Traits>
struct TransposeStorage<Traits, true> {
  alignas(1024) typename Traits::ElementKv raw[Traits::kStages * Traits::kTileN * Traits::kRowVo];
  cute::array<float4, Traits::kConsumerThreads * Traits::kSharedSums> sums;
  Ring<Traits::kStages> raw_ring;
};

// Q as it arrives where it is quantised, and the factors of its rows' scores (load_query.cuh).
template <class Traits>
struct RawQuery {
  alignas(1024) std::uint16_t rows[Traits::kTileM * Traits::kHeadQk];
  float factors[Traits::kQStages][Traits::kTileM];
  Ring<1> ring;
};

template <class Traits>
struct SharedStorage : KvBuffers<Traits>, ConversionStorage<Traits>, TransposeStorage<Traits> {
  using ElementO = typename Traits::ElementO;
  alignas(1024) typename Traits::ElementQ q[cosize_v<typename Traits::LayoutQ>];
  // Each warp stages its 16 rows of O here, one block of columns at a time.
  alignas(1024) ElementO o[Traits::kConsumerWarps][kWarpRows * kBlockColumns<ElementO>];
  ItemState items[kItemSlots];
  TmaCoordinates boxes[3][Traits::kMaxBoxes];  // of what each loading warp is issuing
  struct {
    Ring<Traits::kQStages> q;
    Ring<Traits::kStages> k, v;
    Ring<kItemSlots, Barrier> item;
  } barriers;
  conditional_t<Traits::kSliced, SliceState<Traits>, Nothing> slice;
  conditional_t<Traits::kHasMaskBits, MaskTileSlots<Traits>, Nothing> kept;
  conditional_t<Traits::kBiasByProduct, typename Traits::BiasSteps, Nothing> bias_steps;
  conditional_t<Traits::kQuantizesQ, RawQuery<Traits>, Nothing> raw_q;
};

template <class Traits>
CUTE_DEVICE auto& conversion_of(SharedStorage<Traits>& smem) {
  if constexpr (Traits::kSliced) {
    return smem.slice.conversion;
  } else {
    return smem.conversion;
  }
}

CUTE_DEVICE int lane_id() { return threadIdx.x % 32; }
// lane_id() for code that runs once per item: the compiler computes nothing from it ahead of time,
// and keeps no registers for the results in between.
CUTE_DEVICE int fresh_lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

CUTE_DEVICE void release(Barrier& empty) {
  if (lane_id() == 0) empty.arrive();
}

// Announces what the warp has written.
// NOTE: it writes through the generic proxy, and wgmma reads through the async one. No lane's next
// copy may overwrite what another lane still reads.
CUTE_DEVICE void publish_writes(Barrier& full) {
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  release(full);
}

// Orders memory accesses for the compiler. NOTE: CUTLASS's barriers and fences do not.
CUTE_DEVICE void order_memory_accesses() { asm volatile("" ::: "memory"); }

// Tells the compiler that all lanes hold the same value, which then stays in uniform registers.
CUTE_DEVICE int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// The state of a pipeline: the stage to use next and its barrier's phase. Consumer warps keep both,
// which makes their loop shorter; producer warps have few registers and derive both from one
// counter.
template <int kSize>
struct ConsumerPipelineState {
  int stage = 0;
  std::uint32_t parity = 0;

  CUTE_DEVICE int index() const { return stage; }
  CUTE_DEVICE std::uint32_t phase() const { return parity; }
  CUTE_DEVICE void advance() {
    if (++stage == kSize) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kSize>
struct ProducerPipelineState {
  static_assert((kSize & (kSize - 1)) == 0);
  std::uint32_t count = 0;

  CUTE_DEVICE int index() const { return count % kSize; }
  CUTE_DEVICE std::uint32_t phase() const { return count / kSize % 2; }
  CUTE_DEVICE void advance() { ++count; }
};

}  // namespace preflash::sm90
