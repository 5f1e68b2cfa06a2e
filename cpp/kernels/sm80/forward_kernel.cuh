// One CTA of the fa2 kernel: its share of the planner's work list, item by item.
#pragma once

#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/item_timer.cuh"
#include "kernels/sm80/forward_epilogue.cuh"

namespace preflash::sm80 {

template <class Traits>
__device__ __forceinline__ void run_item(const KernelSegment& params, const RequestInfo& request,
                                         const WorkItem& item, SharedStorage<Traits>& smem,
                                         int thread) {
  MaskBounds bounds = bounds_of(params, request);

  int num_rows = request.qo_len * params.group_size;
  int last_row = min(item.row_begin + Traits::kTileM, num_rows) - 1;
  RowSpan rows{unpack_row(params, item.row_begin).token, unpack_row(params, last_row).token};
  KeySpan chunk = chunk_of(item, request, params.chunk_origin);
  TileRange tiles = touched_tiles(bounds, rows, chunk, Traits::kTileN, mask_of<Traits>(params));
  // The plan was made for longer requests (RequestLengths): no row exists, and none is written.
  if (item.row_begin >= num_rows) tiles = {};

  using Mainloop = ForwardMainloop<Traits>;
  typename Mainloop::Softmax softmax;
  typename Mainloop::AccumulatorO tOrO;
  KvLoader<Traits> loader(params, request, item.kv_head, smem, thread);
  fetch_q(params, request, item, bounds, smem, thread);
  Mainloop(params, request, item, smem, thread).run(tiles, loader, softmax, tOrO);
  ForwardEpilogue<Traits>{params, request, item, smem, thread}.run(softmax, tOrO);
}

// In the shared memory of a CTA, which holds one item at a time.
template <class Traits, class Segment>
__device__ __forceinline__ void run_item_in(unsigned char* smem_bytes, const Segment& segment,
                                            const RequestInfo& request, const WorkItem& item,
                                            int thread) {
  run_item(segment, request, item, *reinterpret_cast<SharedStorage<Traits>*>(smem_bytes), thread);
}

template <class V>
__global__ void __launch_bounds__(ForwardTraits<V>::kThreads, V::kTile.ctas_per_sm)
    forward_kernel(const __grid_constant__ typename ForwardTraits<V>::Params params) {
  using Traits = ForwardTraits<V>;
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  [[maybe_unused]] auto& smem = *reinterpret_cast<SharedStorage<Traits>*>(smem_bytes);

  // Through asm, so that it stays in a register: a re-read of %tid costs 30 clocks a tile.
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  if constexpr (Traits::kConverts) {
    if (params.segments[0].position == Position::kRope) {
      fill_rotary_tables(params.segments[0], smem.conversion, thread);
    }
  }
  let_next_kernel_begin();
  int begin = blockIdx.x;
  int end = begin + 1;
  if (params.cta_begin != nullptr) {
    begin = params.cta_begin[blockIdx.x];
    end = params.cta_begin[blockIdx.x + 1];
  }
  for (int index = begin; index < end; ++index) {
    // Everybody is done with the last item: its K, V and row tables, and its O in Q's bytes.
    if (index > begin) __syncthreads();
    ItemTimer timer;
    timer.start();
    const WorkItem& item = params.items[index];
    const RequestInfo request = params.request(item.request);
    if constexpr (Traits::kSegments == 2) {
      using SecondTraits = ForwardTraits<SecondSegment<V>>;
      static_assert(SecondTraits::kThreads == Traits::kThreads);
      if (request.segment == 0) {
        run_item_in<Traits>(smem_bytes, params.segments[0], request, item, thread);
      } else {
        run_item_in<SecondTraits>(smem_bytes, params.segments[1], request, item, thread);
      }
    } else {
      run_item(params.segments[0], request, item, smem, thread);
    }
    if (thread == 0) timer.stop(params, index, item);
  }
}

}  // namespace preflash::sm80
