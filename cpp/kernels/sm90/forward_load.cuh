// The producer warpgroup: work items, Q, and the K/V tiles of each, last tile first.
//
//   produce_boxes: ragged tensors and pages of 8 n rows, by TMA. One warp works the items out, one
//     fetches Q and K, one V; in the last two one lane issues boxes while the other lanes look up
//     the page of one box each, a tile ahead.
//   produce_rows: any other page size, page 1 above all, by cp.async. All four warps copy rows of K
//     and V in turn; each lane looks up the page of one or two rows, two tiles ahead.
#pragma once

#include "kernels/sm90/box_loader.cuh"
#include "kernels/sm90/row_loader.cuh"
#include "kernels/sm90/work_items.cuh"

namespace preflash::sm90 {

// One CTA's share of the work list, by three warps.
template <class Traits>
__device__ __forceinline__ void produce_boxes(const HopperParams& params,
                                              SharedStorage<Traits>& smem, int begin, int end) {
  int warp = cutlass::canonical_warp_idx_sync();
  if (warp == 0) {
    ItemReader<Traits> items{smem};
    QLoader<Traits> q{params, smem};
    BoxLoader<Traits, Operand::kK> k(params, smem);
    while (const ItemState* state = items.wait()) {
      k.load_item(*state, [&] { q.load(*state); });
      items.release();
    }
  } else if (warp == 1) {
    ItemReader<Traits> items{smem};
    BoxLoader<Traits, Operand::kV> v(params, smem);
    while (const ItemState* state = items.wait()) {
      v.load_item(*state, [] {});
      items.release();
    }
  } else if (warp == 2) {
    ItemProducer<Traits> items{params, smem, begin, end};
    while (!items.done()) items.announce();
  }
}

// The same by the whole warpgroup: everybody loads rows, warp 0 does the rest too.
template <class Traits>
__device__ __forceinline__ void produce_rows(const HopperParams& params,
                                             SharedStorage<Traits>& smem, int begin, int end) {
  bool leads = cutlass::canonical_warp_idx_sync() == 0;
  ItemProducer<Traits> producer{params, smem, begin, end};
  ItemReader<Traits> items{smem};
  QLoader<Traits> q{params, smem};
  RowLoader<Traits> rows(params, smem);
  // Each round announces an item and loads the one before it.
  for (bool first = true;; first = false) {
    if (leads && !producer.done()) producer.announce();
    if (first) continue;
    const ItemState* state = items.wait();
    if (state == nullptr) break;
    rows.load_item(*state, [&] {
      if (leads) q.load(*state);
    });
    items.release();
  }
  rows.drain();
}

}  // namespace preflash::sm90
