// The decode kernel: the warps of a CTA share an item's keys, and meet only to add up their parts.
#pragma once

#include "kernels/common/dependent_launch.cuh"
#include "kernels/sm90/decode_products.cuh"

namespace preflash::sm90 {

// The end of a decode item: adds up and stores the warps' parts of all rows.
template <class Traits>
struct DecodeMerge {
  using Products = DecodeProducts<Traits>;
  static constexpr int kRows = 2;                     // of one lane
  static constexpr int kQuads = Traits::kHeadVo / 4;  // neighbouring columns of a row

  DecodeStorage<Traits>& smem;
  const HopperSegment& params;
  const ItemState& state;
  int warp;

  // All warps come here with their sums over the item's keys.
  CUTE_DEVICE void run(const SpeculativeSoftmax& softmax, const ScoreBias<Traits>& bias,
                       Products& products) const {
    share(softmax);
    __syncthreads();
    float part[kRows];
    SpeculativeSoftmax whole = merged(softmax, part);
    RowTarget target;  // one warp writes the LSE
    if (warp == 0) target = epilogue().target_of(lane_id() % kWarpRows);
    ScoreCoordinates<Traits> of_item{ItemView::of(params, state), 0, state.tiles.begin};
    auto ready = epilogue().prepare(products, whole, bias, of_item, target);
    CUTE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      if (r * Traits::kMergedRows >= state.num_rows) break;
      // A row without keys is 0, also where 0 * V is inf or NaN.
      write_part(products, r, ready.empty[r] ? 0.0f : part[r] * ready.factor[r], ready.empty[r]);
      __syncthreads();
      store_rows(r);
      __syncthreads();
    }
  }

 private:
  CUTE_DEVICE static int row_of(int r) { return lane_id() / 4 + r * 8; }

  CUTE_DEVICE void share(const SpeculativeSoftmax& softmax) const {
    for_rows([&](int r) {
      float total = SpeculativeSoftmax::quad_sum(softmax.sum[r]);
      if (lane_id() % 4 == 0) smem.rows[warp][row_of(r)] = {softmax.row_max_ref[r], total};
    });
  }
  // The softmax over the keys of all warps. part: the factors of this warp's part of O.
  CUTE_DEVICE SpeculativeSoftmax merged(const SpeculativeSoftmax& softmax,
                                        float (&part)[kRows]) const {
    const float scale_log2 = params.logits.scale_log2;
    SpeculativeSoftmax whole;
    for_rows([&](int r) {
      RowState rows[Traits::kWarps];
      CUTE_UNROLL
      for (int w = 0; w < Traits::kWarps; ++w) {
        rows[w] = smem.rows[w][row_of(r)];
        whole.row_max_ref[r] = fmaxf(whole.row_max_ref[r], rows[w].row_max_ref);
      }
      float total = 0.0f;
      CUTE_UNROLL
      for (int w = 0; w < Traits::kWarps; ++w) {
        total += rows[w].sum * SpeculativeSoftmax::change_of_reference(
                                   rows[w].row_max_ref, whole.row_max_ref[r], scale_log2);
      }
      // finish() adds up a quad's sums.
      whole.sum[r] = lane_id() % 4 == 0 ? total : 0.0f;
      part[r] = SpeculativeSoftmax::change_of_reference(softmax.row_max_ref[r],
                                                        whole.row_max_ref[r], scale_log2);
    });
    return whole;
  }
  CUTE_DEVICE ForwardEpilogue<Traits> epilogue() const { return {ItemView::of(params, state)}; }

  // Four columns of a row. The turn spreads the lanes of a quad, whose columns lie 32 apart, over
  // the banks.
  CUTE_DEVICE float4& place(int writer, int row, int quad) const {
    int turned = quad ^ quad / 8 % 4 * 2;
    return reinterpret_cast<float4*>(smem.merged[writer][row])[turned];
  }
  CUTE_DEVICE void write_part(Products& products, int r, float factor, bool empty) const {
    if (row_of(r) >= state.num_rows) return;
    auto rows_of_o = products.rows_of_o();  // columns: (2, blocks)
    constexpr int kPiece = Products::kPieceV;
    CUTE_UNROLL
    for (int load = 0; load < Products::kLoadsV; ++load) {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        CUTE_UNROLL
        for (int i = 0; i < kPiece; i += 4) {
          auto value = [&](int column) {
            float x = rows_of_o(r, (load * kPiece + i + column) * 2 + c);
            return empty ? 0.0f : x * factor;
          };
          place(warp, lane_id() / 4, (Products::first_column(load, c) + i) / 4) =
              make_float4(value(0), value(1), value(2), value(3));
        }
      }
    }
  }

  // Adds up the parts of the rows r * 8 ... and stores them, four columns to a thread.
  CUTE_DEVICE void store_rows(int r) const {
    int num_rows = min(state.num_rows - r * Traits::kMergedRows, Traits::kMergedRows);
    for (int i = threadIdx.x; i < num_rows * kQuads; i += Traits::kThreads) {
      int row = i / kQuads;
      int quad = i % kQuads;
      if (quad * 4 >= params.head_dim_vo) continue;
      float4 sum = place(0, row, quad);
      CUTE_UNROLL
      for (int w = 1; w < Traits::kWarps; ++w) {
        float4 other = place(w, row, quad);
        sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
      }
      epilogue().store_four(epilogue().target_of(r * Traits::kMergedRows + row).o, quad * 4, sum);
    }
  }
};

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
  Scores<Traits> scores;
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
        ForwardEpilogue<Traits>{view(state)}.run_empty();
      }
      if (threadIdx.x == 0) timer.stop(params, index, state.item);
    }
  }

 private:
  CUTE_DEVICE const HopperSegment& segment() const { return params.segments[0]; }
  CUTE_DEVICE ItemView view(const ItemState& state) const { return ItemView::of(segment(), state); }

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
    DecodeMerge<Traits>{smem, segment(), state, warp}.run(softmax, scores.bias, products);
  }

  CUTE_DEVICE void begin_item(const ItemState& state) {
    query.load(view(state));
    scores = Scores<Traits>::of(Coordinates{view(state), 0, state.tiles.begin}, query);
    softmax = {};
    clear(products.out);
  }

  template <DType kFrom>
  CUTE_DEVICE void run_slice(const ItemState& state, int slice) {
    const unsigned char* k = smem.ring[warp][stage];
    products.template multiply_qk<kFrom>(query, k);
    auto rows_of_s = products.rows_of_s();
    scores.multiply(rows_of_s);
    if (!Traits::kOptionsAtRunTime || segment().soft_cap > 0.0f) {
      transform_logits<Traits::kVariant.logits>(rows_of_s, segment().logits);
    }
    scores.bias.add_to(rows_of_s);
    if (state.tiles.needs_mask(slice)) {
      TileMask<Traits>::of_bounds(Coordinates{view(state), 0, slice}).apply(rows_of_s);
    }
    softmax.update(products, scores.bias.shift(slice), segment(), [] {});
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
