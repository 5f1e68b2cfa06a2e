// The epilogue writes the accumulators to o and lse, or to split-KV partials. Each warp stores its
// 16 rows through shared memory of its own.
#pragma once

#include <cuda_fp8.h>
#include <cutlass/arch/memory.h>

#include <cute/arch/copy_sm90.hpp>

#include "kernels/common/convert.cuh"
#include "kernels/common/four_floats.cuh"
#include "kernels/common/matrices.cuh"
#include "kernels/common/swizzle.cuh"
#include "kernels/sm90/scores.cuh"

namespace preflash::sm90 {

// Output addresses of a row of an item, from this CTA's first column on: in o, or in the item's
// partials. Null if the row does not exist; lse also if another CTA computes the first column.
struct RowTarget {
  void* o = nullptr;    // Element, or float of a partial
  void* lse = nullptr;  // float, or PartialLse
};

// Values beyond 448 become 448.
CUTE_DEVICE void store_e4m3(std::uint8_t* target, float2 x) {
  *reinterpret_cast<__nv_fp8x2_storage_t*>(target) =
      __nv_cvt_float2_to_fp8x2(x, __NV_SATFINITE, __NV_E4M3);
}

template <class Traits>
struct ForwardEpilogue : ItemView {
  using Element = typename Traits::ElementO;
  static constexpr int kColumns = kBlockColumns<Element>;  // stored at a time
  // True if o may be bfloat16 where the products' dtype is float16.
  static constexpr bool kStoresBfloat16 = Traits::kTakes8Bits && is_same_v<Element, half_t>;

  CUTE_DEVICE RowTarget target_of(int row) const {
    if (row >= num_rows) return {};
    if (!is_final()) {
      std::int64_t partial = std::int64_t{item.partial_row} + row;
      float* o = params.partial_o + partial * params.head_dim_vo + first_column();
      return {o, first_column() == 0 ? params.partial_lse + partial : nullptr};
    }
    const PackedRow of_row = packed(row);
    std::int64_t token = request.qo_begin + of_row.token;
    int head = query_head(of_row);
    RowTarget target;
    target.o = static_cast<char*>(params.o.data) +
               (token * params.o.stride_token + head * params.o.stride_head + first_column()) *
                   output_bytes();
    if (params.lse.data != nullptr && first_column() == 0) {
      target.lse =
          params.lse.data + token * params.lse.stride_token + head * params.lse.stride_head;
    }
    return target;
  }

  // Values that the epilogue computes before O is complete.
  struct Prepared {
    float factor[2];   // for this thread's two rows of O
    bool empty[2];     // the row kept no key
    float keyless[2];  // of kRowSumColumns: the sink's weight, which is no part of the row sums
    void* o;           // target of the warp's row lane_id() % 16
  };

  // Computes and stores all but O, while the item's last product runs. target: as Prepared::o.
  CUTE_DEVICE Prepared prepare(auto& mma, auto& softmax, const auto& bias,
                               const ScoreCoordinates<Traits>& coordinates,
                               const RowTarget& target) const {
    mma.prepare_o(softmax, params);
    RowResult result[2];
    auto missing = bias.missing(coordinates);
    for_rows([&](int r) {
      result[r] = softmax.template finish<Traits::kVariant.q_dtype>(
          r, missing, params.logits.scale_log2, params.lse.form);
    });
    Prepared ready;
    if constexpr (Traits::kRowSumColumns > 0) {
      for_rows([&](int r) {
        const float logit = adds_keyless() ? sink(params.extras, coordinates.head(r)) : -INFINITY;
        ready.keyless[r] = softmax.template weight_of<Traits::kVariant.q_dtype>(
            r, logit, params.logits.scale_log2);
      });
    }
    if (adds_keyless()) {
      for_rows([&](int r) { add_keyless(result[r], params, coordinates.head(r)); });
    }
    for_rows([&](int r) {
      ready.factor[r] = result[r].factor * out_scale();
      // A huge row's P may all be rounded to 0, which does not make it a row without keys.
      ready.empty[r] =
          Traits::kRowSumColumns > 0 ? softmax.row_max_ref[r] == -INFINITY : result[r].empty;
    });
    ready.o = target.o;
    // No branch around the shuffles: it would cost registers on the way to the next item.
    PartialLse value{.high = of_row(result[0].lse.high, result[1].lse.high),
                     .low = of_row(result[0].lse.low, result[1].lse.low)};
    if (lane_id() < kWarpRows) store_lse(target, value);
    return ready;
  }

  // mma: the sum over the item's keys, O and row sums if any. staging: this warp's [16, kColumns]
  CUTE_DEVICE void store(Prepared ready, auto& mma, Element* staging) const {
    mma.finish_o();
    auto& accumulator = mma.tOrO;  // ((2, 2, N / 8), 1, 1)
    Tensor tOrO = make_tensor(accumulator.data(), columns_of_o(accumulator.layout()));
    auto rows_of_o = make_tensor(tOrO.data(), as_rows_and_columns(tOrO.layout()));
    if constexpr (Traits::kRowSumColumns > 0) {
      for_rows([&](int r) {
        // Columns of one number: every lane of the quad has the row's sum.
        const float total =
            __fmul_rn(accumulator(size(tOrO) + 2 * r), 1.0f / Traits::kRowSumFactor);
        ready.empty[r] &= total == 0.0f;
        ready.factor[r] =
            ready.empty[r] ? 0.0f : reciprocal_approx(total + ready.keyless[r]) * out_scale();
      });
    }
    // + 0: a zero is +0, as in rows that are merged from chunks.
    for_each_element(rows_of_o, [&](int r, int, float& x) { x = fmaf(x, ready.factor[r], 0.0f); });
    // A row without keys is 0, also where 0 * V is inf or NaN.
    if (__any_sync(0xffffffffu, ready.empty[0] || ready.empty[1])) {
      for_each_element(rows_of_o, [&](int r, int, float& x) { x = ready.empty[r] ? 0.0f : x; });
    }
    if (!is_final()) {
      store_pairs<float>(ready, rows_of_o,
                         [](float* target, float2 x) { *reinterpret_cast<float2*>(target) = x; });
    } else if (output_bytes() == 1) {
      store_pairs<std::uint8_t>(ready, rows_of_o, store_e4m3);
    } else if (kStoresBfloat16 && params.o_dtype == DType::kBFloat16) {
      store_final<bfloat16_t>(ready, tOrO, staging);
    } else {
      store_final<Element>(ready, tOrO, staging);
    }
  }

  // Stores four neighbouring columns of a row whose target is `row`.
  CUTE_DEVICE void store_four(void* row, int column, const float4& x) const {
    const FourFloats four{{{x.x, x.y}, {x.z, x.w}}};
    if (!is_final()) {
      *reinterpret_cast<float4*>(static_cast<float*>(row) + column) = x;
    } else if (params.o_dtype == DType::kFloat16) {
      four.store<DType::kFloat16>(static_cast<char*>(row) + column * 2);
    } else if (params.o_dtype == DType::kBFloat16) {
      four.store<DType::kBFloat16>(static_cast<char*>(row) + column * 2);
    } else {
      auto* target = static_cast<std::uint8_t*>(row) + column;
      store_e4m3(target, {x.x, x.y});
      store_e4m3(target + 2, {x.z, x.w});
    }
  }

  // Writes an item whose rows keep no key; any single warp may run it.
  CUTE_DEVICE void run_empty() const {
    for (int row = 0; row < num_rows; ++row) {
      RowTarget target = target_of(row);
      float lse = -INFINITY;
      if (adds_keyless() && params.lse.form == LseForm::kLogSum) {
        lse = sink(params.extras, query_head(packed(row)));
      }
      if (lane_id() == 0) store_lse(target, {.high = 0.0f, .low = lse});
      for (int column = lane_id() * 4; column < num_columns(); column += 128) {
        store_four(target.o, column, {0.0f, 0.0f, 0.0f, 0.0f});
      }
    }
  }

 private:
  // The columns of O that this CTA makes: at most kPartVo of them.
  CUTE_DEVICE static int first_column() { return sm90::first_column<Traits>(); }
  CUTE_DEVICE int num_columns() const {
    return min(params.head_dim_vo - first_column(), Traits::kPartVo);
  }

  // ((2, 2, N / 8), 1, 1) -> ((2, 2, D / 8), 1, 1), without the row sums
  __device__ static constexpr auto columns_of_o(auto layout) {
    if constexpr (Traits::kRowSumColumns == 0) {
      return layout;
    } else {
      return make_layout(
          make_shape(make_shape(_2{}, _2{}, Int<Traits::kPartVo / 8>{}), _1{}, _1{}));
    }
  }

  CUTE_DEVICE bool is_final() const { return item.partial_row == WorkItem::kFinal; }

  // An element of o: the products' dtype, or with 8-bit queries the caller's.
  CUTE_DEVICE int output_bytes() const {
    return Traits::kTakes8Bits ? size_of(params.o_dtype) : sizeof(Element);
  }
  CUTE_DEVICE float out_scale() const {
    if constexpr (!Traits::kTakes8Bits) return params.out_scale;
    const float* of_v = params.extras.scale_v;
    return of_v == nullptr ? params.out_scale : params.out_scale * __ldg(of_v + item.kv_head);
  }

  // A split row gets its sink where the partials are merged.
  CUTE_DEVICE bool adds_keyless() const { return has_keyless(params.extras) && is_final(); }

  // The value of row lane_id() % 16; quad q holds those of rows q and q + 8.
  CUTE_DEVICE static float of_row(float upper, float lower) {
    int quad = lane_id() % 8 * 4;
    upper = __shfl_sync(0xffffffffu, upper, quad);
    lower = __shfl_sync(0xffffffffu, lower, quad);
    return lane_id() < 8 ? upper : lower;
  }
  CUTE_DEVICE void store_lse(const RowTarget& target, const PartialLse& lse) const {
    if (target.lse == nullptr) return;
    if (is_final()) {
      store_row_lse(params.lse, static_cast<float*>(target.lse), lse);
    } else {
      *static_cast<PartialLse*>(target.lse) = lse;
    }
  }

  // The target of one of the warp's 16 rows; all lanes call this together.
  template <class T>
  CUTE_DEVICE static T* target_row(const Prepared& ready, int row) {
    auto address = reinterpret_cast<unsigned long long>(ready.o);
    return reinterpret_cast<T*>(__shfl_sync(0xffffffffu, address, row));
  }

  // Calls store(target, pair) for the pairs of neighbouring elements of O that exist.
  template <class T, class Rows, class Store>
  CUTE_DEVICE void store_pairs(const Prepared& ready, const Rows& rows_of_o,
                               const Store& store) const {
    // Converting kernels have no registers in which to keep the columns from item to item.
    const int lane = Traits::kConverts ? fresh_lane_id() : lane_id();
    CUTE_UNROLL
    for (int r = 0; r < size<0>(rows_of_o); ++r) {
      T* target = target_row<T>(ready, lane_id() / 4 + r * 8);
      if (target == nullptr) continue;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(rows_of_o); c += 2) {
        int column = c / 2 * 8 + lane % 4 * 2;
        if (column < num_columns()) {
          store(target + column, make_float2(rows_of_o(r, c), rows_of_o(r, c + 1)));
        }
      }
    }
  }

  // Stores a block of columns at a time: 16 rows of 128 bytes, swizzled. Output: 16 bits.
  template <class Output>
  CUTE_DEVICE void store_final(const Prepared& ready, const auto& tOrO, void* staging) const {
    constexpr int kRowsPerPass = 4;  // 8 lanes a row
    constexpr int kPasses = kWarpRows / kRowsPerPass;
    Output* targets[kPasses];  // null if the row does not exist
    int column = lane_id() % 8 * (kColumns / 8);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      targets[pass] = target_row<Output>(ready, pass * kRowsPerPass + lane_id() / 8);
    }

    Tensor tOrO_out = convert_fragment<Output>(tOrO);
    Tensor quads = recast<std::uint32_t>(tOrO_out);  // ((1, 2, D / 8), 1, 1)
    std::uint32_t base = cast_smem_ptr_to_uint(staging);
    // stmatrix: lane l gives the address of row l % 16 of the 8 columns l / 16 of a 16 x 16 block.
    CUTE_UNROLL
    for (int block = 0; block < Traits::kBlocksO; ++block) {
      if (block > 0) __syncwarp();
      CUTE_UNROLL
      for (int i = 0; i < kColumns / 16; ++i) {
        int column = 16 * i + lane_id() / 16 * 8;
        std::uint32_t address = base + swizzled<kWarpRows>(lane_id() % 16, column);
        const auto* r = &quads(0) + (block * (kColumns / 16) + i) * 4;
        store_matrices(address, r[0], r[1], r[2], r[3]);
      }
      __syncwarp();
      uint128_t values[kPasses];
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        const auto* row = reinterpret_cast<const char*>(staging) +
                          swizzled<kWarpRows>(pass * kRowsPerPass + lane_id() / 8, column);
        values[pass] = *reinterpret_cast<const uint128_t*>(row);
      }
      bool in_head = block * kColumns + column < num_columns();
      CUTE_UNROLL
      for (int pass = 0; pass < kPasses; ++pass) {
        cutlass::arch::global_store<uint128_t, 16>(values[pass],
                                                   targets[pass] + block * kColumns + column,
                                                   in_head && targets[pass] != nullptr);
      }
    }
    // All lanes must have read the staging buffer before the next item overwrites it.
    __syncwarp();
  }
};

}  // namespace preflash::sm90
