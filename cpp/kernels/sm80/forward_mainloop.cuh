// The hot loop: S = Q K^T, bias, mask, online softmax, O += P V over the KV tiles of one work item.
//
// K and V have kStages buffers each; their copies are committed one group per half step, in the
// order K0 V0 K1 V1 ..., so "at most 2 * kStages - 2 groups in flight" always means that the half
// tile needed now has landed. With t' = t + kStages:
//   step t:  wait K(t) | fetch V(t' - 1), find offsets(t')  | S = Q K(t)            | store
//   offsets(t')
//            row maxima, wait V(t) | fetch K(t')            | softmax, O += P V(t)
// The barrier after each wait also means that no warp reads the buffer which the next fetch
// overwrites, and that the offsets it uses have been stored. Operands that are converted on load
// are so between wait and barrier.
#pragma once

#include "kernels/common/convert.cuh"
#include "kernels/sm80/forward_convert.cuh"
#include "kernels/sm80/forward_load.cuh"
#include "kernels/sm80/forward_mask.cuh"
#include "kernels/sm80/lazy_softmax.cuh"
#include "kernels/sm80/row_peers.cuh"

namespace preflash::sm80 {

template <class Traits>
struct ForwardMainloop {
  using Mma = typename Traits::Mma;
  using MmaOp = typename Traits::MmaOp;
  using Storage = SharedStorage<Traits>;
  using Bias = ScoreBias<Traits>;
  using Softmax = LazySoftmax<Traits::kRowsPerThread, Traits::kVariant.sparsity>;
  using AccumulatorS = decltype(partition_fragment_C(
      typename Traits::MmaS{},
      Shape<Int<Traits::kTileM>, Int<Traits::kTileN>>{}));  // ((2, 2), MMA_M, MMA_N)
  using AccumulatorO = decltype(partition_fragment_C(
      Mma{}, Shape<Int<Traits::kTileM>, Int<Traits::kHeadVo>>{}));  // ((2, 2), MMA_M, MMA_N)
  using TileQ = OperandTile<typename Traits::ElementQ, Traits::kTileM, MatrixOrder::kRowsFirst>;
  using TileK =
      OperandTile<typename Traits::ElementKv, Traits::kTileN,
                  Traits::kNarrowKeys ? MatrixOrder::kFourChunks : MatrixOrder::kChunksFirst>;
  using TileV = OperandTile<typename Traits::ElementKv, Traits::kTileN, MatrixOrder::kRowsFirst>;

  const KernelSegment& params;
  const RequestInfo& request;
  const WorkItem& item;
  Storage& smem;
  int thread;
  TileQ sQ;  // (tile_m, d_qk)
  TileK sK;  // (tile_n, d_qk), stage 0
  TileV sV;  // (tile_n, d_vo), stage 0
  RowPeers<Traits> peers;

  __device__ __forceinline__ ForwardMainloop(const KernelSegment& params,
                                             const RequestInfo& request, const WorkItem& item,
                                             Storage& smem, int thread)
      : params(params),
        request(request),
        item(item),
        smem(smem),
        thread(thread),
        sQ(smem.q, thread / 32 % Traits::kRowWarps * 16, thread % 32),
        sK(smem.k[0], column_warp(thread) * Traits::kWarpKeys, thread % 32),
        sV(smem.v[0], 0, thread % 32, column_warp(thread) * 2),
        peers(smem, thread) {}

  __device__ __forceinline__ void run(const TileRange& tiles, KvLoader<Traits>& loader,
                                      Softmax& softmax, AccumulatorO& tOrO) const {
    constexpr int kStages = Traits::kStages;
    clear(tOrO);
    prologue(tiles, loader);
    auto rows_of_o = make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));

    OperandConversion<Traits> conversion{params, request, item, smem, thread};
    QPrologue<Traits> q_prologue{conversion};
    if (q_prologue.wanted()) {
      cp_async_wait<0>();
      __syncthreads();
      q_prologue.run();
    }
    QFragments q;
    if constexpr (Traits::kKeptQ > 0) {
      wait_half_tile([] {});
      CUTE_UNROLL
      for (int depth = 0; depth < Traits::kKeptQ; ++depth) load_q(q.at[q_buffer(depth)], depth);
    }

    const bool has_rows = !Traits::kIdleWarps || this->has_rows();
    if constexpr (Traits::kVariant.sparsity == Sparsity::kSkipping) {
      RowCoordinates<Traits> rows(params, request, item, thread);
      softmax.maxima_so_far = RunningMaxima<1>::of(
          params, request, [&](int) { return rows.exists(Softmax::kept_row(thread)); });
    }

    auto step = [&](int tile, int stage) {
      wait_half_tile([&] { conversion.keys(tile, stage); });  // V(tile - 1) has been read
      if (tile + kStages - 1 < tiles.end) {
        int next = tile + kStages - 1;
        loader.fetch_v(next, stage == 0 ? kStages - 1 : stage - 1, fill_of(tiles, next));
      }
      cp_async_fence();
      bool fetch_next = tile + kStages < tiles.end;
      if (fetch_next) loader.find_offsets(tile + kStages);
      AccumulatorS tSrS;
      clear(tSrS);
      if (has_rows) multiply_qk(tSrS, q, stage);
      if (fetch_next) loader.store_offsets(tile + kStages);
      auto rows_of_s = make_tensor(tSrS.data(), as_rows_and_columns(tSrS.layout()));
      ScoreCoordinates<Traits> at({params, request, item, thread}, tile);
      if (changes_scores<Traits>(params)) {
        conversion.scores(rows_of_s, at);
        if (has_soft_cap<Traits>(params)) {
          transform_logits<Traits::kVariant.logits>(tSrS, params.logits);
        }
        if (Bias::present(params)) Bias::add_to(rows_of_s, at, smem.bias_rows);
      }
      if (tiles.needs_mask(tile)) mask_tile(rows_of_s, at, smem, thread % 32);
      float offset[Traits::kRowsPerThread];
      bool weighs = has_rows &&
                    softmax.refer(rows_of_s, rows_of_o, Softmax::params_of(params), peers, offset);
      // After the maxima, because few warps then wait for one that is late with its products.
      wait_half_tile([&] { conversion.values(stage); });  // K(tile) has been read
      if (fetch_next) loader.fetch_k(tile + kStages, stage, fill_of(tiles, tile + kStages));
      cp_async_fence();
      if (!weighs) return;
      softmax.weigh(rows_of_s, params.logits.scale_log2, offset);
      multiply_pv(tOrO, tSrS, stage);
    };

    int stage = 0;
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      step(tile, stage);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    // Without a tile Q's copy may still be in flight, and O leaves through Q's bytes.
    cp_async_wait<0>();
    if (tiles.count() == 0) __syncthreads();
  }

 private:
  // True if the request has any of this warp's rows.
  __device__ __forceinline__ bool has_rows() const {
    return item.row_begin + thread / 32 * 16 < request.qo_len * params.group_size;
  }

  __device__ __forceinline__ static int column_warp(int thread) {
    return thread / 32 / Traits::kRowWarps;
  }

  // Waits for a half tile; `convert` changes this thread's part of it.
  template <class Convert>
  __device__ __forceinline__ static void wait_half_tile(Convert convert) {
    cp_async_wait<2 * Traits::kStages - 2>();
    convert();
    __syncthreads();
  }

  // Only tiles before full_begin may reach below a window.
  __device__ __forceinline__ static TileFill fill_of(const TileRange& tiles, int tile) {
    return tile < tiles.full_begin ? TileFill::kPartial : TileFill::kWhole;
  }

  // Commits K0 V0 ... K(kStages - 1), Q with K0.
  __device__ __forceinline__ void prologue(const TileRange& tiles, KvLoader<Traits>& loader) const {
    CUTE_UNROLL
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      int tile = tiles.begin + stage;
      if (tile < tiles.end) {
        loader.find_offsets(tile);
        loader.store_offsets(tile);
        __syncthreads();
        loader.fetch_k(tile, stage, fill_of(tiles, tile));
      }
      cp_async_fence();
      if (stage == Traits::kStages - 1) break;
      if (tile < tiles.end) loader.fetch_v(tile, stage, fill_of(tiles, tile));
      cp_async_fence();
    }
  }

  // A operands of 16 columns of Q each: the first kKeptQ blocks stay, the rest take turns in two
  // more.
  static constexpr int kBlocksQk = Traits::kHeadQk / 16;
  static constexpr int kBuffersQ = Traits::kKeptQ + (Traits::kKeptQ < kBlocksQk ? 2 : 0);
  struct QFragments {
    std::uint32_t at[kBuffersQ][Traits::kMmaM][4];
  };
  __device__ static constexpr int q_buffer(int depth) {
    return depth < Traits::kKeptQ ? depth : Traits::kKeptQ + depth % 2;
  }

  // tSrS += Q K^T. K and V fragments are loaded where they are used: prefetching them by one, two
  // or three blocks costs registers, which ptxas takes back with spills and later loads
  // (docs/dev/experiments/fa2.md).
  __device__ __forceinline__ void multiply_qk(AccumulatorS& tSrS, QFragments& q, int stage) const {
    TileK tile_k = sK;
    tile_k.base += stage * static_cast<int>(sizeof(smem.k[0]));
    if constexpr (Traits::kKeptQ == 0) load_q(q.at[q_buffer(0)], 0);
    if constexpr (Traits::kNarrowKeys) {
      multiply_8_keys(tSrS, q, tile_k);
    } else {
      multiply_16_keys(tSrS, q, tile_k);
    }
  }

  // Computes multiply_qk() for a warp with 16 keys of every kMmaColumns.
  __device__ __forceinline__ void multiply_16_keys(AccumulatorS& tSrS, QFragments& q,
                                                   const TileK& tile_k) const {
    CUTE_UNROLL
    for (int depth = 0; depth < kBlocksQk; ++depth) {
      CUTE_UNROLL
      for (int n = 0; n < Traits::kTileN / Traits::kMmaColumns; ++n) {
        std::uint32_t k[4];
        tile_k.load(k, n * Traits::kMmaColumns, depth * 16);
        if (n == 0 && depth + 1 < kBlocksQk && depth + 1 >= Traits::kKeptQ) {
          load_q(q.at[q_buffer(depth + 1)], depth + 1);
        }
        CUTE_UNROLL
        for (int m = 0; m < Traits::kMmaM; ++m) {
          mma_16x16x16<MmaOp>(tSrS(_, m, 2 * n), tSrS(_, m, 2 * n + 1), q.at[q_buffer(depth)][m],
                              k);
        }
      }
    }
  }

  // Computes multiply_qk() for a warp with 8 keys of the tile.
  __device__ __forceinline__ void multiply_8_keys(AccumulatorS& tSrS, QFragments& q,
                                                  const TileK& tile_k) const {
    std::uint32_t k[4];
    CUTE_UNROLL
    for (int depth = 0; depth < kBlocksQk; ++depth) {
      const int half = depth % 2 * 2;
      if (half == 0) tile_k.load(k, 0, depth * 16);
      if (depth + 1 < kBlocksQk && depth + 1 >= Traits::kKeptQ) {
        load_q(q.at[q_buffer(depth + 1)], depth + 1);
      }
      CUTE_UNROLL
      for (int m = 0; m < Traits::kMmaM; ++m) {
        mma_16x8x16<MmaOp>(tSrS(_, m, 0), q.at[q_buffer(depth)][m], k[half], k[half + 1]);
      }
    }
  }

  __device__ __forceinline__ void load_q(std::uint32_t (&q)[Traits::kMmaM][4], int depth) const {
    CUTE_UNROLL
    for (int m = 0; m < Traits::kMmaM; ++m) sQ.load(q[m], m * Traits::kMmaRows, depth * 16);
  }

  // tOrO += P V, P the 16-bit rounding of tSrS.
  __device__ __forceinline__ void multiply_pv(AccumulatorO& tOrO, const AccumulatorS& tSrS,
                                              int stage) const {
    TileV tile_v = sV;
    tile_v.base += stage * static_cast<int>(sizeof(smem.v[0]));
    Tensor tSrP = convert_fragment<typename Traits::ElementP>(tSrS);
    OperandP<Traits> p;
    peers.exchange(recast<std::uint32_t>(tSrP), p);  // ((1, 2), MMA_M, MMA_N)
    CUTE_UNROLL
    for (int depth = 0; depth < Traits::kTileN / 16; ++depth) {
      CUTE_UNROLL
      for (int n = 0; n < Traits::kHeadVo / Traits::kMmaColumns; ++n) {
        std::uint32_t v[4];
        tile_v.load_transposed(v, depth * 16, n * Traits::kMmaColumns);
        CUTE_UNROLL
        for (int m = 0; m < Traits::kMmaM; ++m) {
          mma_16x16x16<MmaOp>(tOrO(_, m, 2 * n), tOrO(_, m, 2 * n + 1), p[depth][m], v);
        }
      }
    }
  }
};

}  // namespace preflash::sm80
