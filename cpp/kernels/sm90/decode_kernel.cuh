// The decode kernel: the warps of a CTA share an item's keys, and meet only to add up their parts.
#pragma once

#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/item_timer.cuh"
#include "kernels/sm90/decode_merge.cuh"
#include "kernels/sm90/scores.cuh"

namespace preflash::sm90 {

template <class Traits>
struct DecodeWarp {
  using Params = LaunchParams<HopperSegment>;
  using Coordinates = ScoreCoordinates<Traits>;

  const Params& params;
  DecodeStorage<Traits>& smem;
  int warp;
  SliceLoader<Traits> loader;
  DecodeProducts<Traits> products;
  SpeculativeSoftmax softmax = {};
  DecodeQuery<Traits> query;
  ScoreBias<Traits> bias;
  HeadFactors<Traits> factors;
  int stage = 0;  // of the slice to be computed next
  ItemTimer timer;

  CUTE_DEVICE DecodeWarp(const Params& params, DecodeStorage<Traits>& smem, int warp, int begin,
                         int end)
      : params(params),
        smem(smem),
        warp(warp),
        loader(params, smem.ring[warp][0], warp, begin, end) {}

  CUTE_DEVICE void run(int begin, int end) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kStages - 1; ++i) loader.request();
    for (int index = begin; index < end; ++index) {
      timer.start();
      ItemState state = read_decode_item<Traits>(params, index);
      if (state.num_rows <= 0) continue;
      if (state.tiles.count() > 0) {
        run_item(state);
      } else if (warp == 0) {
        Epilogue{segment(), state.item, state.request, state.num_rows}.run_empty();
      }
      if (threadIdx.x == 0) timer.stop(params, index, state.item);
    }
  }

 private:
  using Epilogue = ForwardEpilogue<Traits>;

  CUTE_DEVICE const HopperSegment& segment() const { return params.segments[0]; }

  CUTE_DEVICE void run_item(const ItemState& state) {
    begin_item(state);
    for (int slice = state.tiles.end - 1 - warp; slice >= state.tiles.begin;
         slice -= Traits::kWarps) {
      cute::cp_async_wait<Traits::kStages - 2>();
      __syncwarp();  // all lanes have this slice, and have read the one before: its place is free
      loader.request();
      if constexpr (Traits::kConverts) {
        dispatch_8_bits(segment().kv_dtype, [&](auto from) { run_slice<from>(state, slice); });
      } else {
        run_slice<Traits::kProducts>(state, slice);
      }
      stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
    }
    DecodeMerge<Traits>{smem, segment(), state, warp}.run(softmax, bias, products);
  }

  CUTE_DEVICE void begin_item(const ItemState& state) {
    Coordinates of_item{segment(), state, 0, state.tiles.begin};
    query.load(segment(), state);
    bias = ScoreBias<Traits>::of(of_item);
    factors = HeadFactors<Traits>::of(of_item, [&](int r) { return query.factor[r]; });
    softmax = {};
    clear(products.out);
  }

  template <DType kFrom>
  CUTE_DEVICE void run_slice(const ItemState& state, int slice) {
    const unsigned char* k = smem.ring[warp][stage];
    products.template multiply_qk<kFrom>(query, k);
    auto rows_of_s = products.rows_of_s();
    factors.apply(rows_of_s);
    if (!Traits::kOptionsAtRunTime || segment().soft_cap > 0.0f) {
      transform_logits<Traits::kVariant.logits>(rows_of_s, segment().logits);
    }
    bias.add_to(rows_of_s);
    if (state.tiles.needs_mask(slice)) {
      TileMask<Traits>::of_bounds(Coordinates{segment(), state, 0, slice}).apply(rows_of_s);
    }
    auto rows_of_o = products.rows_of_o();
    softmax.update(rows_of_s, bias.shift(slice), products.weights, rows_of_o, segment(), [] {});
    products.template multiply_pv<kFrom>(k + Traits::kSliceBytesK);
  }
};

template <class V>
__global__ void __launch_bounds__(DecodeTraits<V>::kThreads, V::kTile.ctas_per_sm)
    decode_kernel(const __grid_constant__ LaunchParams<HopperSegment> params) {
  using Traits = DecodeTraits<V>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<DecodeStorage<Traits>*>(smem_bytes);
  let_next_kernel_begin();
  auto [begin, end] = items_of_cta<Traits>(params);
  int warp = cutlass::canonical_warp_idx_sync();
  DecodeWarp<Traits>(params, smem, warp, begin, end).run(begin, end);
}

}  // namespace preflash::sm90
