// The fa3 kernel: a CTA initializes its barriers, and its warpgroups take their roles, in which
// producer warps take theirs (README.md, "Roles").
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/dependent_launch.cuh"
#include "kernels/sm90/eight_bit.cuh"
#include "kernels/sm90/forward_mainloop.cuh"
#include "kernels/sm90/load_converted.cuh"
#include "kernels/sm90/paired_mainloop.cuh"

namespace preflash::sm90 {

// Announces a CTA's items, and the full and partial tiles of a custom mask.
template <class Traits>
using Announcer =
    conditional_t<Traits::kHasMaskBits, MaskTileProducer<Traits>, ItemProducer<Traits>>;

// Announcements by a loading warp: none, if another warp makes them ...
struct AnnouncesNothing {
  static constexpr bool kRunsAhead = false;

  CUTE_DEVICE void announce_item() const {}
  CUTE_DEVICE void announce_tile() const {}
};

// ... or all, if all warps load. The leader announces an item while the item before is still to be
// loaded. With a custom mask it announces an item after the loads of the item before, because all
// tiles of an item are announced before the next item. A tile is announced right before its load.
//
// NOTE: a consumer waits for the announcement of its next tile while it holds buffers that the
// leader may wait for. The announcement comes in time: a tile is published only after the next tile
// has been announced. At an item's end the next item's first tile is announced before any of its
// loads, and the last tiles' loads need no buffer of the last step.
template <class Traits>
struct LeaderAnnounces {
  static constexpr bool kRunsAhead = !Traits::kHasMaskBits;

  Announcer<Traits> announcer;
  bool is_leader;

  CUTE_DEVICE void announce_item() {
    if (is_leader && !announcer.done()) announcer.announce_item();
  }
  CUTE_DEVICE void announce_tile() {
    if (is_leader) announcer.announce_tile();
  }
};

// Loads a CTA's items by one warp. A loader's load_item() calls its third argument, which loads Q,
// once the first tile (of K) has been requested, and drain() publishes what is still in flight.
template <class Traits, class Announces, class Loader, class LoadQ>
CUTE_DEVICE void load_items(SharedStorage<Traits>& smem, Announces&& announces, Loader&& loader,
                            const LoadQ& load_q) {
  ItemReader<Traits> items{smem};
  TileStream<Traits, Announces> tiles{smem, announces};
  // announce_item() is large, so it is inlined once.
  for (bool runs_ahead = announces.kRunsAhead;; runs_ahead = false) {
    announces.announce_item();
    if (runs_ahead) continue;
    const ItemState* state = items.wait();
    if (state == nullptr) break;
    loader.load_item(*state, tiles, [&] { load_q(*state); });
    items.release();
  }
  loader.drain();
}

// Load targets: the tiles and slices that the products read, or raw ones that are converted.
template <class Traits, Operand kOperand>
using LoadedTile =
    conditional_t<Traits::kConverts, RawTile<Traits, kOperand>, TileWriter<Traits, kOperand>>;
template <class Traits>
using LoadedSlice = conditional_t<Traits::kConverts, RawSlice<Traits>, SliceWriter<Traits>>;

// Warps that load K and V by TMA: one for each operand, or some that take turns at slices. The next
// warp announces the items.
template <class Traits>
inline constexpr int kLoaders = Traits::kSliced ? LoadedSlice<Traits>::kLoaders : 2;

// One warp announces a CTA's items; others load them. The first one loads Q, unless it is
// quantised: then one more warp does, an item ahead.
template <class Traits>
CUTE_DEVICE void produce_tma(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem, int begin,
                             int end) {
  static_assert(kLoaders<Traits> < kWarpgroupWarps);
  const int warp = cutlass::canonical_warp_idx_sync();
  QLoader<Traits> q{params, smem};
  auto load_q = [&](const ItemState& state) {
    if (warp == 0 && !Traits::kQuantizesQ) q.load(state);
  };
  if (Traits::kQuantizesQ && warp == kLoaders<Traits> + 1) {
    ItemReader<Traits> items{smem};
    while (const ItemState* state = items.wait()) {
      q.load(*state);
      items.release();
    }
  } else if (warp == kLoaders<Traits>) {
    Announcer<Traits> announcer{params, smem, begin, end};
    while (!announcer.done()) {
      announcer.announce_item();
      while (announcer.has_tile()) announcer.announce_tile();
    }
  } else if constexpr (Traits::kSliced) {
    using Slices = SliceBoxes<Traits, LoadedSlice<Traits>>;
    KvSliceLoader<Traits, Slices> slices(params.segments[0], smem, warp);
    if (warp < kLoaders<Traits>) load_items(smem, AnnouncesNothing{}, slices, load_q);
  } else if (warp == 0) {
    TmaLoader<Traits, LoadedTile<Traits, Operand::kK>> k(params, smem);
    load_items(smem, AnnouncesNothing{}, k, load_q);
  } else if (warp == 1) {
    TmaLoader<Traits, LoadedTile<Traits, Operand::kV>> v(params, smem);
    load_items(smem, AnnouncesNothing{}, v, load_q);
  }
}

// Every warp loads a share of each tile or slice; warp 0 also announces the items and loads Q.
template <class Traits, class Loader>
CUTE_DEVICE void produce_together(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem,
                                  int begin, int end) {
  const bool is_leader = cutlass::canonical_warp_idx_sync() == 0;
  QLoader<Traits> q{params, smem};
  LeaderAnnounces<Traits> announces{{params, smem, begin, end}, is_leader};
  load_items(smem, announces, Loader(params, smem), [&](const ItemState& state) {
    if (is_leader) q.load(state);
  });
}

template <class Traits>
CUTE_DEVICE void produce(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem, int begin,
                         int end, bool gather) {
  using Slices = SliceRows<Traits, LoadedSlice<Traits>>;
  using Gather = conditional_t<
      Traits::kSliced, KvSliceLoader<Traits, Slices>,
      GatherLoader<Traits, LoadedTile<Traits, Operand::kK>, LoadedTile<Traits, Operand::kV>>>;
  if (gather) {
    produce_together<Traits, Gather>(params, smem, begin, end);
  } else {
    produce_tma(params, smem, begin, end);
  }
}

// One warpgroup loads raw tiles or slices, the other one converts them; slices of a launch with
// RoPE both.
template <class Traits>
CUTE_DEVICE void produce_converted(const ParamsOf<Traits>& params, SharedStorage<Traits>& smem,
                                   int begin, int end, bool gather, int warpgroup) {
  const auto& segment = params.segments[0];
  constexpr int kBoth = 2 * Traits::kProducerRegisters;
  constexpr int kLoader = Traits::kSliced ? Traits::kProducerRegisters : 32;
  if (!loads_raw<Traits>(segment)) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    using Loader = KvSliceLoader<Traits, ConvertedSlices<Traits>>;
    if constexpr (Traits::kSliced) produce_together<Traits, Loader>(params, smem, begin, end);
  } else if (warpgroup == 1) {
    cutlass::arch::warpgroup_reg_dealloc<kBoth - kLoader>();
    using Converter = conditional_t<Traits::kSliced, KvSliceLoader<Traits, SliceWidener<Traits>>,
                                    TileConverter<Traits>>;
    load_items(smem, AnnouncesNothing{}, Converter(segment, smem), [](const ItemState&) {});
  } else {
    cutlass::arch::warpgroup_reg_dealloc<kLoader>();
    // Keys alone are rotated.
    using Gather = GatherLoader<Traits, RawTile<Traits, Operand::kK, typename Traits::ElementKv>,
                                TileWriter<Traits, Operand::kV>>;
    if (dequantizes<Traits>(segment)) {
      produce(params, smem, begin, end, gather);
    } else if constexpr (!Traits::kSliced) {
      produce_together<Traits, Gather>(params, smem, begin, end);
    }
  }
}

template <class Traits>
CUTE_DEVICE void init_barriers(const HopperSegment& segment, SharedStorage<Traits>& smem,
                               bool gather) {
  auto& barriers = smem.barriers;
  // Arrivals that announce what is loaded, and what is converted: one lane of each warp.
  const int loads = gather ? kWarpgroupWarps : 1;
  const int converters = loads_raw<Traits>(segment) ? kWarpgroupWarps : Traits::kProducerWarps;
  const int producers = Traits::kConverts ? converters : loads;
  const int first_warps = gather ? kWarpgroupWarps : kLoaders<Traits> + Traits::kQuantizesQ;
  const int loading_warps = first_warps + Traits::kProducerWarps - kWarpgroupWarps;
  constexpr int kConsumers = Traits::kConsumerWarps;
  barriers.q.init(Traits::kQuantizesQ ? kWarpgroupWarps : 1, kConsumers);
  barriers.k.init(producers, kConsumers);
  barriers.v.init(Traits::kTransposesV ? kWarpgroupWarps : producers, kConsumers);
  barriers.item.init(1, Traits::kConsumerThreads + loading_warps * 32);
  if constexpr (Traits::kTransposesV) smem.raw_ring.init(producers, kWarpgroupWarps);
  if constexpr (Traits::kQuantizesQ) smem.raw_q.ring.init(1, kWarpgroupWarps);
  if constexpr (Traits::kConverts) {
    conversion_of(smem).ring.init(gather ? kWarpgroupThreads : 1, kWarpgroupWarps);
  }
  if constexpr (Traits::kSliced) {
    smem.slice.ring.init(producers, kConsumers);
    if constexpr (Traits::kClusterSize > 1) smem.slice.pair.p.init(1, 1);
  }
  if constexpr (Traits::kHasMaskBits) smem.kept.ring.init(1, kConsumers + loading_warps);
  cutlass::arch::fence_barrier_init();
}

template <class V>
__global__ void __launch_bounds__(ForwardTraits<V>::kThreads, V::kTile.ctas_per_sm)
    forward_kernel(const __grid_constant__ ParamsOf<ForwardTraits<V>> params) {
  using Traits = ForwardTraits<V>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<SharedStorage<Traits>*>(smem_bytes);

  // The first item needs the tensor maps and its range of the work list: both are requested before
  // the barriers are initialized. All segments are gathered, or none (make_maps()).
  bool gather = params.segments[0].box.kv_rows == 0;
  if (!Traits::kConverts && threadIdx.x == 0) {
    CUTE_UNROLL
    for (int s = 0; s < Traits::kSegments; ++s) {
      const TensorMaps& maps = params.segments[s].maps;
      prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.q));
      if (!gather) {
        prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.k.boxes));
        prefetch_tma_descriptor(reinterpret_cast<const TmaDescriptor*>(&maps.v.boxes));
      }
    }
  }
  auto [begin, end] = items_of_cta<Traits>(params);
  if (threadIdx.x == kWarpgroupThreads) init_barriers(params.segments[0], smem, gather);
  if constexpr (Traits::kConverts) {
    const auto& segment = params.segments[0];
    if (segment.position == Position::kRope) fill_rotary_tables(segment.rotary, smem);
  }
  if constexpr (Traits::kBiasByProduct) ScoreBias<Traits>::fill_steps(smem);
  let_next_kernel_begin();
  if constexpr (Traits::kClusterSize > 1) {
    cute::cluster_sync();
  } else {
    __syncthreads();
  }

  int warpgroup = cutlass::canonical_warp_group_idx();
  if (warpgroup < Traits::kProducers) {
    if constexpr (Traits::kConverts) {
      return produce_converted(params, smem, begin, end, gather, warpgroup);
    }
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if constexpr (Traits::kTransposesV) {
      if (warpgroup == 1) return transpose_values(params.segments[0], smem);
    }
    produce(params, smem, begin, end, gather);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    int thread = threadIdx.x % kWarpgroupThreads;
    const int consumer = warpgroup - Traits::kProducers;
    if constexpr (Traits::kClusterSize > 1) {
      PairedMainloop<Traits>(params, smem, consumer, thread).run();
      cute::cluster_sync();  // the other CTA may still arrive at this one's barriers
    } else {
      ForwardMainloop<Traits>(params, smem, consumer, thread).run();
    }
  }
}

}  // namespace preflash::sm90
