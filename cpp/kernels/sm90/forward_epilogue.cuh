// From the accumulators to o and lse, or to split-KV partials. Each warp works on its own 16 rows
// through its own bytes of shared memory: no barrier beyond the warp, and the producers fill K, V
// and Q for the next item meanwhile.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "kernels/common/convert.cuh"
#include "kernels/common/online_softmax.cuh"
#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/forward_traits.cuh"
#include "kernels/sm90/warpgroup_mma.cuh"

namespace preflash::sm90 {

template <class Traits>
struct ForwardEpilogue {
  using Element = typename Traits::Element;
  using Softmax = OnlineSoftmax<2>;

  const HopperParams& params;
  const WorkItem& item;
  const RequestInfo& request;
  int num_rows;
  int tile_row = 0;            // first of this warp's 16
  Element* staging = nullptr;  // this warp's [16, 64]

  // tOrO: ((2, 2, D / 8), 1, 1), the sum over this item's keys
  template <class AccumulatorO>
  __device__ __forceinline__ void run(Softmax& softmax, AccumulatorO& tOrO) const {
    auto rows_of_o = make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));
    bool final = item.partial_slot == WorkItem::kFinal;
    bool empty[2];
    CUTE_UNROLL
    for (int r = 0; r < size<0>(rows_of_o); ++r) {
      float lse;
      float factor = softmax.finish(r, params.logits.scale_log2, &lse) * params.out_scale;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); ++c) rows_of_o(r, c) *= factor;
      empty[r] = lse == -INFINITY;
      if (lane_id() % 4 == 0) store_lse(tile_row + lane_id() / 4 + r * 8, lse, final);
    }
    if (__any_sync(0xffffffffu, empty[0] || empty[1])) {
      // NOTE: a row that kept nothing is 0 even where 0 * V was not.
      CUTE_UNROLL
      for (int r = 0; r < size<0>(rows_of_o); ++r) {
        CUTE_UNROLL
        for (int c = 0; c < size<1>(rows_of_o); ++c) {
          if (empty[r]) rows_of_o(r, c) = 0.0f;
        }
      }
    }
    if (final) {
      store_final(tOrO);
    } else {
      store_partial(rows_of_o);
    }
  }

  // An item whose rows keep nothing, by any one warp.
  __device__ __forceinline__ void run_empty() const {
    bool final = item.partial_slot == WorkItem::kFinal;
    for (int row = 0; row < num_rows; ++row) {
      if (lane_id() == 0) store_lse(row, -INFINITY, final);
      for (int column = lane_id(); column < params.head_dim_vo; column += 32) {
        if (final) {
          o_begin()[o_offset(row) + column] = Element(0.0f);
        } else {
          partial_row(row)[column] = 0.0f;
        }
      }
    }
  }

 private:
  // Row `row` of the tile in o, from o's first row of this request and KV head on.
  __device__ __forceinline__ Element* o_begin() const {
    return static_cast<Element*>(params.o.data) + request.qo_begin * params.o.stride_token +
           item.kv_head * params.group_size * params.o.stride_head;
  }
  __device__ __forceinline__ std::int64_t o_offset(int row) const {
    PackedRow packed = unpack_row(params, item.row_begin + row);
    return packed.token * params.o.stride_token + packed.head_in_group * params.o.stride_head;
  }
  // [head_dim_vo], of this item's slot
  __device__ __forceinline__ float* partial_row(int row) const {
    return params.partial_o +
           (static_cast<std::int64_t>(item.partial_slot) * Traits::kTileM + row) *
               params.head_dim_vo;
  }

  __device__ __forceinline__ void store_lse(int row, float lse, bool final) const {
    if (row >= num_rows) return;
    if (!final) {
      params.partial_lse[static_cast<std::int64_t>(item.partial_slot) * Traits::kTileM + row] = lse;
    } else if (params.lse.data != nullptr) {
      PackedRow packed = unpack_row(params, item.row_begin + row);
      params.lse.data[(request.qo_begin + packed.token) * params.lse.stride_token +
                      (item.kv_head * params.group_size + packed.head_in_group) *
                          params.lse.stride_head] = lse * params.lse.scale;
    }
  }

  template <class Rows>
  __device__ __forceinline__ void store_partial(const Rows& rows_of_o) const {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(rows_of_o); ++r) {
      int row = tile_row + lane_id() / 4 + r * 8;
      if (row >= num_rows) continue;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); c += 2) {
        int column = c / 2 * 8 + lane_id() % 4 * 2;
        if (column < params.head_dim_vo) {
          *reinterpret_cast<float2*>(partial_row(row) + column) =
              make_float2(rows_of_o(r, c), rows_of_o(r, c + 1));
        }
      }
    }
  }

  // 64 columns at a time: 16 rows of 128 bytes, whose 16-byte pieces are swizzled by the row.
  template <class AccumulatorO>
  __device__ __forceinline__ void store_final(const AccumulatorO& tOrO) const {
    constexpr int kRowsPerPass = 4;  // 8 lanes a row
    constexpr int kPasses = kWarpRows / kRowsPerPass;
    Element* targets[kPasses];  // null: no such row
    int column = lane_id() % 8 * 8;
    Element* o = o_begin() + column;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int row = tile_row + pass * kRowsPerPass + lane_id() / 8;
      targets[pass] = row < num_rows ? o + o_offset(row) : nullptr;
    }

    Tensor tOrO_out = convert_fragment<Element>(tOrO);
    Tensor quads = recast<std::uint32_t>(tOrO_out);  // ((1, 2, D / 8), 1, 1)
    std::uint32_t base = cast_smem_ptr_to_uint(staging);
    // stmatrix: lane l gives the address of row l % 16 of the 8 columns l / 16 of a 16 x 16 block.
    int store_row = lane_id() % 16;
    int load_row = lane_id() / 8;
    CUTE_UNROLL
    for (int block = 0; block < Traits::kBlocksVo; ++block) {
      if (block > 0) __syncwarp();
      CUTE_UNROLL
      for (int i = 0; i < kBlockColumns / 16; ++i) {
        int piece = 2 * i + lane_id() / 16;
        std::uint32_t address = base + store_row * kBlockRowBytes + (piece ^ store_row % 8) * 16;
        const auto* r = &quads(0) + (block * (kBlockColumns / 16) + i) * 4;
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
            "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
            : "memory");
      }
      __syncwarp();
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        int row = pass * kRowsPerPass + load_row;
        int piece = lane_id() % 8 ^ row % 8;
        uint128_t value = *reinterpret_cast<const uint128_t*>(
            reinterpret_cast<const char*>(staging) + row * kBlockRowBytes + piece * 16);
        if (targets[pass] != nullptr && block * kBlockColumns + column < params.head_dim_vo) {
          *reinterpret_cast<uint128_t*>(targets[pass] + block * kBlockColumns) = value;
        }
      }
    }
    // The next item's first store meets no lane that still reads.
    __syncwarp();
  }
};

}  // namespace preflash::sm90
