// O and LSE of one work item: normalised, and written either to their rows or to partial ones.
#pragma once

#include "kernels/sm80/forward_mainloop.cuh"

namespace preflash::sm80 {

template <class Traits>
struct ForwardEpilogue {
  using ElementO = typename Traits::ElementO;
  using Mainloop = ForwardMainloop<Traits>;
  using Bias = ScoreBias<Traits>;
  using Softmax = typename Mainloop::Softmax;
  using AccumulatorO = typename Mainloop::AccumulatorO;

  const KernelSegment& params;
  const RequestInfo& request;
  const WorkItem& item;
  SharedStorage<Traits>& smem;
  int thread;

  __device__ __forceinline__ void run(Softmax& softmax, AccumulatorO& tOrO) const {
    auto rows_of_o = make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));
    RowCoordinates<Traits> at(params, request, item, thread);
    RowPeers<Traits> peers(smem, thread);
    peers.sum(softmax.sum);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(rows_of_o); ++r) {
      RowResult result = finish_row(softmax, at, r);
      float factor = result.factor * out_scale();
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); ++c) {
        // A row without keys is 0, also where 0 * V is inf or NaN. + 0: a zero is +0, as in rows
        // that are merged from chunks.
        rows_of_o(r, c) = result.empty ? 0.0f : fmaf(rows_of_o(r, c), factor, 0.0f);
      }
      if (peers.first() && thread % 4 == 0) store_lse(at, r, result.lse);
    }
    if (!final()) {
      store_partial(rows_of_o, at);
    } else if (!Traits::kConverts || params.o_dtype == Traits::kVariant.q_dtype) {
      store_final<ElementO>(tOrO);
    } else {
      store_other(tOrO, rows_of_o, at);
    }
  }

 private:
  __device__ __forceinline__ bool final() const { return item.partial_row == WorkItem::kFinal; }

  __device__ __forceinline__ float out_scale() const {
    const float* of_v = Traits::kConverts ? params.extras.scale_v : nullptr;
    return of_v == nullptr ? params.out_scale : params.out_scale * of_v[item.kv_head];
  }

  // With 8-bit queries the output has any dtype.
  template <class Rows>
  __device__ __forceinline__ void store_other(const AccumulatorO& tOrO, const Rows& rows_of_o,
                                              const RowCoordinates<Traits>& at) const {
    if (params.o_dtype == DType::kBFloat16) {
      store_final<cutlass::bfloat16_t>(tOrO);
    } else if (params.o_dtype == DType::kFloat16) {
      store_final<cutlass::half_t>(tOrO);
    } else {
      store_e4m3(rows_of_o, at);
    }
  }

  // Values beyond the largest number become the largest: the format has no infinity.
  template <class Rows>
  __device__ __forceinline__ void store_e4m3(const Rows& rows_of_o,
                                             const RowCoordinates<Traits>& at) const {
    auto places = accumulator_places<Traits, Traits::kHeadVo>(thread);
    CUTE_UNROLL
    for (int r = 0; r < size<0>(rows_of_o); ++r) {
      if (!at.exists(r)) continue;
      Query query = at.query(r);
      auto* o = static_cast<std::uint8_t*>(params.o.data) +
                (request.qo_begin + query.token) * params.o.stride_token +
                query.head * params.o.stride_head;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); c += 2) {
        int column = get<1>(places(r, c));
        if (column < params.head_dim_vo) {
          *reinterpret_cast<__nv_fp8x2_storage_t*>(o + column) = __nv_cvt_float2_to_fp8x2(
              make_float2(rows_of_o(r, c), rows_of_o(r, c + 1)), __NV_SATFINITE, __NV_E4M3);
        }
      }
    }
  }

  __device__ __forceinline__ RowResult finish_row(const Softmax& softmax,
                                                  const RowCoordinates<Traits>& at, int r) const {
    RowResult result = softmax.finish(r, params.logits.scale_log2, params.lse.form);
    if (!result.empty && Bias::present(params)) {
      Bias::count_in_lse(result.lse, r, at, smem.bias_rows);
    }
    // Not in a partial row: the merge adds the sink once.
    if (has_keyless(params.extras) && final()) {
      add_keyless(result, params, at.query(r).head);
    }
    return result;
  }

  __device__ __forceinline__ void store_lse(const RowCoordinates<Traits>& at, int r,
                                            PartialLse lse) const {
    if (!at.exists(r)) return;
    if (!final()) {
      params.partial_lse[std::int64_t{item.partial_row} + at.tile_row(r)] = lse;
    } else if (params.lse.data != nullptr) {
      Query query = at.query(r);
      float* place = params.lse.data + (request.qo_begin + query.token) * params.lse.stride_token +
                     query.head * params.lse.stride_head;
      store_row_lse(params.lse, place, lse);
    }
  }

  template <class Rows>
  __device__ __forceinline__ void store_partial(const Rows& rows_of_o,
                                                const RowCoordinates<Traits>& at) const {
    auto places = accumulator_places<Traits, Traits::kHeadVo>(thread);
    // [rows of the item, head_dim_vo]
    float* partial = params.partial_o + std::int64_t{item.partial_row} * params.head_dim_vo;
    CUTE_UNROLL
    for (int r = 0; r < size<0>(rows_of_o); ++r) {
      if (!at.exists(r)) continue;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); c += 2) {
        int column = get<1>(places(r, c));
        if (column < params.head_dim_vo) {
          *reinterpret_cast<float2*>(partial + at.tile_row(r) * params.head_dim_vo + column) =
              make_float2(rows_of_o(r, c), rows_of_o(r, c + 1));
        }
      }
    }
  }

  // Through shared memory, so that rows leave in chunks. Element: 16 bits.
  template <class Element>
  __device__ __forceinline__ void store_final(const AccumulatorO& tOrO) const {
    Element* staged = reinterpret_cast<Element*>(smem.o);
    Tensor tOrO_out = convert_fragment<Element>(tOrO);
    Tensor sO = make_tensor(make_smem_ptr(staged), typename Traits::LayoutO{});  // (tile_m, d_vo)
    auto copy_o = typename Traits::template CopyO<Element>{}.get_slice(thread);
    copy(typename Traits::template CopyO<Element>{}, copy_o.retile_S(tOrO_out),
         copy_o.partition_D(sO));
    __syncthreads();

    int num_rows = request.qo_len * params.group_size;
    TileCopy<Traits, Element> place(thread);
    const Element* source = staged + typename Traits::LayoutO{}(place.first_row, place.column);
    Element* o = static_cast<Element*>(params.o.data) + request.qo_begin * params.o.stride_token +
                 item.kv_head * params.group_size * params.o.stride_head;
    CUTE_UNROLL
    for (int pass = 0; pass < Traits::kTileM / Traits::kRowsPerPass; ++pass) {
      int row = item.row_begin + place.first_row + pass * Traits::kRowsPerPass;
      if (row >= num_rows) continue;
      PackedRow packed = unpack_row(params, row);
      Element* target = o + packed.token * params.o.stride_token +
                        packed.head_in_group * params.o.stride_head + place.column;
      CUTE_UNROLL
      for (int block = 0; block < Traits::kHeadVo / place.kBlockColumns; ++block) {
        int column = block * place.kBlockColumns;
        if (column + place.column < params.head_dim_vo) {
          *reinterpret_cast<uint128_t*>(target + column) = *reinterpret_cast<const uint128_t*>(
              source + pass * Traits::kRowsPerPass * place.kBlockColumns +
              block * Traits::kTileM * place.kBlockColumns);
        }
      }
    }
  }
};

}  // namespace preflash::sm80
