// O and LSE of one work item: normalised, and written either to their rows or to partial ones.
#pragma once

#include "kernels/sm80/forward_mainloop.cuh"

namespace preflash::sm80 {

template <class Traits>
struct ForwardEpilogue {
  using ElementO = typename Traits::ElementO;
  using Mainloop = ForwardMainloop<Traits>;
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
    CUTE_UNROLL
    for (int r = 0; r < size<0>(rows_of_o); ++r) {
      RowResult result = finish_row(softmax, at, r);
      float factor = result.factor * params.out_scale;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); ++c) {
        // NOTE: a row that kept nothing is 0 even where 0 * V was not.
        rows_of_o(r, c) = result.empty ? 0.0f : rows_of_o(r, c) * factor;
      }
      if (thread % 4 == 0) store_lse(at, r, result.lse);
    }
    if (final()) {
      store_final(tOrO);
    } else {
      store_partial(rows_of_o, at);
    }
  }

 private:
  __device__ __forceinline__ bool final() const { return item.partial_row == WorkItem::kFinal; }

  __device__ __forceinline__ RowResult finish_row(const Softmax& softmax,
                                                  const RowCoordinates<Traits>& at, int r) const {
    RowResult result = softmax.finish(r, params.logits.scale_log2);
    if constexpr (Traits::kVariant.position == Position::kAlibi) {
      if (!result.empty) {
        AlibiBias<Traits>::count_from_token(result.lse, r, at, smem.row_slopes);
      }
    }
    // A partial row gets no sink: whoever merges the chunks adds it, once.
    if (params.extras.sinks != nullptr && final()) {
      result = add_sink(result, params.extras.sinks[at.query(r).head] * kLog2E);
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
      params.lse.data[(request.qo_begin + query.token) * params.lse.stride_token +
                      query.head * params.lse.stride_head] =
          (lse.high + lse.low) * params.lse.scale;
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

  __device__ __forceinline__ void store_final(const AccumulatorO& tOrO) const {
    Tensor tOrO_out = convert_fragment<ElementO>(tOrO);
    Tensor sO = make_tensor(make_smem_ptr(smem.o), typename Traits::LayoutO{});  // (tile_m, d_vo)
    auto copy_o = typename Traits::CopyO{}.get_slice(thread);
    copy(typename Traits::CopyO{}, copy_o.retile_S(tOrO_out), copy_o.partition_D(sO));
    __syncthreads();

    int num_rows = request.qo_len * params.group_size;
    TileCopy<Traits, ElementO> place(thread);
    const ElementO* source = smem.o + typename Traits::LayoutO{}(place.first_row, place.column);
    ElementO* o = static_cast<ElementO*>(params.o.data) + request.qo_begin * params.o.stride_token +
                  item.kv_head * params.group_size * params.o.stride_head;
    CUTE_UNROLL
    for (int pass = 0; pass < Traits::kTileM / Traits::kRowsPerPass; ++pass) {
      int row = item.row_begin + place.first_row + pass * Traits::kRowsPerPass;
      if (row >= num_rows) continue;
      PackedRow packed = unpack_row(params, row);
      ElementO* target = o + packed.token * params.o.stride_token +
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
