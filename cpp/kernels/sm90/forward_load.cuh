// The producer warpgroup loads Q and the K/V tiles of each work item, the last tile first.
//
//   produce_tma: TMA loads ragged tensors, and pages whose size is a multiple of 8 rows. One warp
//     prepares the work items, one loads Q and K, one loads V. In the loading warps each lane looks
//     up the page of one box, a tile ahead, and one lane issues all boxes.
//   produce_gather: cp.async loads every other page size, above all 1. All four warps copy rows of
//     both K and V; each lane looks up the page of one or two rows, two tiles ahead.
//   produce_transformed: where operands are transformed, cp.async gathers every tensor as it is
//     stored. All four warps copy and transform their rows of both K and V.
//
// With a custom mask the tiles are those that it leaves (kept_tiles.cuh). The warp that prepares
// the items announces them, too.
#pragma once

#include "kernels/sm90/kept_tiles.cuh"
#include "kernels/sm90/load_gather.cuh"
#include "kernels/sm90/load_slices.cuh"
#include "kernels/sm90/load_tma.cuh"
#include "kernels/sm90/load_transformed.cuh"
#include "kernels/sm90/load_widened.cuh"
#include "kernels/sm90/work_items.cuh"

namespace preflash::sm90 {

// Gathers the rows of tiles, or of their slices.
template <class Traits>
using RowGatherer = conditional_t<Traits::kSliced, SliceGatherLoader<Traits>, GatherLoader<Traits>>;

// Announces a CTA's items and the tiles that a custom mask leaves of them.
template <class Traits>
__device__ __forceinline__ void announce_kept_items(const ParamsOf<Traits>& params,
                                                    SharedStorage<Traits>& smem, int begin,
                                                    int end) {
  KeptTileProducer<Traits> producer{params, smem, {params, smem, begin, end}};
  while (!producer.done()) {
    producer.announce_item();
    while (producer.has_tile()) producer.announce_tile();
  }
}

// What the warps of produce_tma() do with a custom mask: where tiles come in slices...
template <class Traits>
  requires(Traits::kSliced)
__device__ __forceinline__ void produce_kept_tma(const ParamsOf<Traits>& params,
                                                 SharedStorage<Traits>& smem, int begin, int end) {
  int warp = cutlass::canonical_warp_idx_sync();
  if (warp == kSliceLoaders) {
    announce_kept_items(params, smem, begin, end);
    return;
  }
  ItemReader<Traits> items{smem};
  KeptTileLoader<Traits> tiles;
  QLoader<Traits> q{params, smem};
  SliceTmaLoader<Traits> slices(params.segments[0], smem, warp);
  auto take = [&] { return tiles.take(smem); };
  while (const ItemState* state = items.wait()) {
    slices.load_kept_tiles(*state, take, [&] {
      if (warp == 0) q.load(*state);
    });
    items.release();
  }
  slices.drain();
}

// ... and where they come whole.
template <class Traits>
__device__ __forceinline__ void produce_kept_tma(const ParamsOf<Traits>& params,
                                                 SharedStorage<Traits>& smem, int begin, int end) {
  int warp = cutlass::canonical_warp_idx_sync();
  ItemReader<Traits> items{smem};
  KeptTileLoader<Traits> tiles;
  auto take = [&] { return tiles.take(smem); };
  if (warp == 0) {
    QLoader<Traits> q{params, smem};
    TmaLoader<Traits, Operand::kK> k(params, smem);
    while (const ItemState* state = items.wait()) {
      k.load_kept_tiles(*state, take, [&] { q.load(*state); });
      items.release();
    }
  } else if (warp == 1) {
    TmaLoader<Traits, Operand::kV> v(params, smem);
    while (const ItemState* state = items.wait()) {
      v.load_kept_tiles(*state, take, [] {});
      items.release();
    }
  } else if (warp == 2) {
    announce_kept_items(params, smem, begin, end);
  }
}

// Where tiles come in slices, three warps take turns at them; the first also loads Q.
template <class Traits>
  requires(Traits::kSliced)
__device__ __forceinline__ void produce_tma(const ParamsOf<Traits>& params,
                                            SharedStorage<Traits>& smem, int begin, int end) {
  constexpr int kItemWarp = kSliceLoaders;
  static_assert(kItemWarp < kWarpgroupWarps);
  int warp = cutlass::canonical_warp_idx_sync();
  if (warp == kItemWarp) {
    ItemProducer<Traits> items{params, smem, begin, end};
    while (!items.done()) items.announce();
    return;
  }
  ItemReader<Traits> items{smem};
  QLoader<Traits> q{params, smem};
  SliceTmaLoader<Traits> slices(params.segments[0], smem, warp);
  while (const ItemState* state = items.wait()) {
    slices.load_item(*state, [&] {
      if (warp == 0) q.load(*state);
    });
    items.release();
  }
  slices.drain();
}

// Three warps load one CTA's share of the work list.
template <class Traits>
__device__ __forceinline__ void produce_tma(const ParamsOf<Traits>& params,
                                            SharedStorage<Traits>& smem, int begin, int end) {
  int warp = cutlass::canonical_warp_idx_sync();
  if (warp == 0) {
    ItemReader<Traits> items{smem};
    QLoader<Traits> q{params, smem};
    TmaLoader<Traits, Operand::kK> k(params, smem);
    while (const ItemState* state = items.wait()) {
      k.load_item(*state, [&] { q.load(*state); });
      items.release();
    }
  } else if (warp == 1) {
    ItemReader<Traits> items{smem};
    TmaLoader<Traits, Operand::kV> v(params, smem);
    while (const ItemState* state = items.wait()) {
      v.load_item(*state, [] {});
      items.release();
    }
  } else if (warp == 2) {
    ItemProducer<Traits> items{params, smem, begin, end};
    while (!items.done()) items.announce();
  }
}

// What the warps of produce_gather() do with a custom mask. NOTE: an item is announced only once
// the one before it has been loaded, because all of that one's tiles come first.
template <class Traits>
__device__ __forceinline__ void produce_kept_gather(const ParamsOf<Traits>& params,
                                                    SharedStorage<Traits>& smem, int begin,
                                                    int end) {
  bool is_leader = cutlass::canonical_warp_idx_sync() == 0;
  KeptTileProducer<Traits> producer{params, smem, {params, smem, begin, end}};
  ItemReader<Traits> items{smem};
  KeptTileLoader<Traits> tiles;
  QLoader<Traits> q{params, smem};
  RowGatherer<Traits> rows(params, smem);
  auto take = [&] {
    if (is_leader) producer.announce_tile();
    return tiles.take(smem);
  };
  for (;;) {
    if (is_leader) producer.announce_item();
    const ItemState* state = items.wait();
    if (state == nullptr) break;
    rows.load_kept_tiles(*state, take, [&] {
      if (is_leader) q.load(*state);
    });
    items.release();
  }
  rows.drain();
}

// The whole warpgroup loads one CTA's share: every warp copies rows, warp 0 also prepares the items
// and loads Q.
template <class Traits>
__device__ __forceinline__ void produce_gather(const ParamsOf<Traits>& params,
                                               SharedStorage<Traits>& smem, int begin, int end) {
  bool is_leader = cutlass::canonical_warp_idx_sync() == 0;
  ItemProducer<Traits> producer{params, smem, begin, end};
  ItemReader<Traits> items{smem};
  QLoader<Traits> q{params, smem};
  RowGatherer<Traits> rows(params, smem);
  // Each iteration announces an item and loads the one announced before it.
  for (bool first = true;; first = false) {
    if (is_leader && !producer.done()) producer.announce();
    if (first) continue;
    const ItemState* state = items.wait();
    if (state == nullptr) break;
    rows.load_item(*state, [&] {
      if (is_leader) q.load(*state);
    });
    items.release();
  }
  rows.drain();
}

// Loads one CTA's share by a loader whose warps work on tiles alone; warp 0 also prepares the
// items.
template <class Traits, class Loader>
__device__ __forceinline__ void load_items(const ParamsOf<Traits>& params,
                                           SharedStorage<Traits>& smem, int begin, int end) {
  bool is_leader = cutlass::canonical_warp_idx_sync() == 0;
  ItemProducer<Traits> producer{params, smem, begin, end};
  ItemReader<Traits> items{smem};
  Loader loader(params.segments[0], smem);
  for (bool first = true;; first = false) {
    if (is_leader && !producer.done()) producer.announce();
    if (first) continue;
    const ItemState* state = items.wait();
    if (state == nullptr) break;
    loader.load_item(*state);
    items.release();
  }
}

// The consumers load Q themselves (load_query.cuh); all else is as above.
template <class Traits>
__device__ __forceinline__ void produce_transformed(const ParamsOf<Traits>& params,
                                                    SharedStorage<Traits>& smem, int begin,
                                                    int end) {
  if constexpr (Traits::kWidens && Traits::kProducers == 2) {
    if (only_widens<Traits>(params.segments[0])) {
      if (threadIdx.x < kWarpgroupThreads) {
        load_items<Traits, WideningLoader<Traits, Operand::kK>>(params, smem, begin, end);
      } else {
        load_items<Traits, WideningLoader<Traits, Operand::kV>>(params, smem, begin, end);
      }
      return;
    }
  }
  load_items<Traits, TransformLoader<Traits>>(params, smem, begin, end);
}

}  // namespace preflash::sm90
