// The producer warpgroup loads Q and the K/V tiles of each work item, the last tile first.
//
//   produce_tma: TMA loads ragged tensors, and pages whose size is a multiple of 8 rows. One warp
//     prepares the work items, one loads Q and K, one loads V. In the loading warps each lane looks
//     up the page of one box, a tile ahead, and one lane issues all boxes.
//   produce_gather: cp.async loads every other page size, above all 1. All four warps copy rows of
//     both K and V; each lane looks up the page of one or two rows, two tiles ahead.
//   produce_converted: where operands are converted, cp.async gathers every tensor as it is
//     stored. All four warps copy and convert their rows of both K and V.
//   transpose_values: a second warpgroup beside either of the first two, for products of 8 bits.
//
// With a custom mask the tiles are the full and partial ones (kept_tiles.cuh). The warp that
// prepares the items also announces these tiles.
#pragma once

#include "kernels/sm90/load_converted.cuh"
#include "kernels/sm90/load_converted_slices.cuh"
#include "kernels/sm90/load_gather.cuh"
#include "kernels/sm90/load_tma.cuh"
#include "kernels/sm90/load_widened.cuh"
#include "kernels/sm90/tile_stream.cuh"
#include "kernels/sm90/transpose_values.cuh"

namespace preflash::sm90 {

// Announces a CTA's items, and the full and partial tiles of a custom mask.
template <class Traits>
using Announcer =
    conditional_t<Traits::kHasMaskBits, KeptTileProducer<Traits>, ItemProducer<Traits>>;

// What a loading warp announces: nothing, where another warp announces everything ...
struct AnnouncesNothing {
  static constexpr bool kRunsAhead = false;

  __device__ __forceinline__ void announce_item() const {}
  __device__ __forceinline__ void announce_tile() const {}
};

// ... or everything, where all warps load: the leader announces between its copies. It announces an
// item while the item before is still to be loaded, and a tile of a custom mask right before it
// loads that tile. With a custom mask it announces an item only after it has loaded the item
// before, because all tiles of an item are announced before the next item.
// NOTE: a consumer waits for the announcement of its next tile while it holds buffers that the
// leader may wait for. The announcement is there in time: a tile is published only after the next
// tile has been announced. At an item's end the next item's first tile is announced before any of
// its loads, and the last tiles' loads need no buffer of the last step.
// none of the last step's buffers.
template <class Traits>
struct LeaderAnnounces {
  static constexpr bool kRunsAhead = !Traits::kHasMaskBits;

  Announcer<Traits> announcer;
  bool is_leader;

  __device__ __forceinline__ void announce_item() {
    if (is_leader && !announcer.done()) announcer.announce_item();
  }
  __device__ __forceinline__ void announce_tile() {
    if (is_leader) announcer.announce_tile();
  }
};

// How a loading warp goes through a CTA's items. load_q(item) follows the load of the first tile.
template <class Traits, class Announces, class Loader, class LoadQ>
__device__ __forceinline__ void load_items(SharedStorage<Traits>& smem, Announces&& announces,
                                           Loader&& loader, const LoadQ& load_q) {
  ItemReader<Traits> items{smem};
  TileStream<Traits, Announces> tiles(smem, announces);
  // announce_item() is large, so it is inlined once.
  for (bool runs_ahead = announces.kRunsAhead;; runs_ahead = false) {
    announces.announce_item();
    if (runs_ahead) continue;
    const ItemState* state = items.wait();
    if (state == nullptr) break;
    loader.load_item(*state, tiles, [&] { load_q(*state); });
    items.release();
  }
  if constexpr (requires { loader.drain(); }) loader.drain();
}

// One warp announces a CTA's items, and others load them: two warps, or for slices three that take
// turns.
template <class Traits>
__device__ __forceinline__ void produce_tma(const ParamsOf<Traits>& params,
                                            SharedStorage<Traits>& smem, int begin, int end) {
  constexpr int kLoaders = Traits::kSliced ? kSliceLoaders : 2;
  static_assert(kLoaders < kWarpgroupWarps);
  const int warp = cutlass::canonical_warp_idx_sync();
  QLoader<Traits> q{params, smem};
  auto load_q = [&](const ItemState& state) {
    if (warp == 0) q.load(state);
  };
  if (warp == kLoaders) {
    Announcer<Traits> announcer{params, smem, begin, end};
    while (!announcer.done()) {
      announcer.announce_item();
      while (announcer.has_tile()) announcer.announce_tile();
    }
  } else if constexpr (Traits::kSliced) {
    SliceTmaLoader<Traits> slices(params.segments[0], smem, warp);
    load_items(smem, AnnouncesNothing{}, slices, load_q);
  } else if (warp == 0) {
    load_items(smem, AnnouncesNothing{}, TmaLoader<Traits, Operand::kK>(params, smem), load_q);
  } else if (warp == 1) {
    load_items(smem, AnnouncesNothing{}, TmaLoader<Traits, Operand::kV>(params, smem), load_q);
  }
}

// Gathers the rows of tiles, or of their slices.
template <class Traits>
using RowGatherer = conditional_t<Traits::kSliced, SliceGatherLoader<Traits>, GatherLoader<Traits>>;

// The whole warpgroup loads one CTA's share: every warp copies rows, warp 0 also prepares the items
// and loads Q.
template <class Traits>
__device__ __forceinline__ void produce_gather(const ParamsOf<Traits>& params,
                                               SharedStorage<Traits>& smem, int begin, int end) {
  const bool is_leader = cutlass::canonical_warp_idx_sync() == 0;
  QLoader<Traits> q{params, smem};
  LeaderAnnounces<Traits> announces{{params, smem, begin, end}, is_leader};
  load_items(smem, announces, RowGatherer<Traits>(params, smem), [&](const ItemState& state) {
    if (is_leader) q.load(state);
  });
}

// Warp 0 also prepares the items. The consumers load Q themselves (load_query.cuh).
template <class Traits>
__device__ __forceinline__ void produce_converted(const ParamsOf<Traits>& params,
                                                  SharedStorage<Traits>& smem, int begin, int end) {
  const HopperSegment& segment = params.segments[0];
  const bool is_leader = cutlass::canonical_warp_idx_sync() == 0;
  auto no_q = [](const ItemState&) {};
  LeaderAnnounces<Traits> announces{{params, smem, begin, end}, is_leader};
  if constexpr (!Traits::kSliced && Traits::kWidens && Traits::kProducers == 2) {
    if (only_widens<Traits>(segment)) {
      if (threadIdx.x < kWarpgroupThreads) {
        load_items(smem, announces, WideningLoader<Traits, Operand::kK>(segment, smem), no_q);
      } else {
        WideningLoader<Traits, Operand::kV> v(segment, smem);
        load_items(smem, AnnouncesNothing{}, v, no_q);
      }
      return;
    }
  }
  using Loader =
      conditional_t<Traits::kSliced, ConvertedSliceLoader<Traits>, ConvertedLoader<Traits>>;
  load_items(smem, announces, Loader(params, smem), no_q);
}

}  // namespace preflash::sm90
