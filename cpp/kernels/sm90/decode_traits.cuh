// The compile-time shape of a decode kernel, which README.md beside this file explains.
#pragma once

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/shared_storage.cuh"

namespace preflash::sm90 {

// Names are those of forward_traits.cuh. A tile of keys is what one warp takes at a time: a slice.
template <class V>
struct DecodeTraits {
  static constexpr Variant kVariant = V::kVariant;
  static constexpr TileShape kTile = V::kTile;
  static constexpr DType kProducts = kVariant.q_dtype;

  static constexpr bool kConverts = kVariant.load == Load::kConverted;
  static constexpr bool kTakes8Bits = kConverts;
  static constexpr int kRowSumColumns = 0;
  static constexpr bool kAlignsQueryTiles = false;
  static_assert(!kConverts || kProducts == DType::kFloat16, "8 bits dequantize to float16");
  static constexpr bool kOptionsAtRunTime = options_at_run_time(kVariant);
  static constexpr bool kHasMaskBits = false;
  static constexpr bool kCaps = false;  // by SoftCap
  static constexpr bool kBiasByProduct = false;
  static constexpr int kSegments = 1;
  static constexpr int kClusterSize = 1;
  static_assert(kVariant.mask == Mask::kBounds && kVariant.segments == Segments::kOne);
  __host__ __device__ static constexpr bool narrows_query(DType q_dtype) {
    return kConverts && q_dtype == DType::kBFloat16;
  }

  using ElementP = Element<kProducts>;
  using ElementO = Element<kProducts>;
  static constexpr int kHeadQk = kVariant.head_dim_qk;
  static constexpr int kHeadVo = kVariant.head_dim_vo;
  static constexpr int kPartVo = kHeadVo;
  static_assert(kHeadQk % 64 == 0 && kHeadVo % 64 == 0 && kHeadVo <= 256);
  static_assert(kHeadVo == 64 || kHeadVo % 128 == 0);

  static constexpr int kTileM = kTile.m;
  static_assert(kTileM == kWarpRows, "all warps have the rows of one mma.sync");
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTileN = kTile.n / kWarps;
  static constexpr int kItemTileN = kTileN;
  static constexpr int kStages = kTile.stages;
  static_assert(kTileN * kWarps == kTile.n && (kTileN == 16 || kTileN == 32));

  static constexpr int kStoredBytes = kConverts ? 1 : 2;  // of an element of K or V
  static constexpr int kSliceBytesK = kTileN * kHeadQk * kStoredBytes;
  static constexpr int kSliceBytes = kSliceBytesK + kTileN * kHeadVo * kStoredBytes;

  static constexpr int kMergedRows = kWarpRows / 2;  // rows whose parts are added up at a time
  static constexpr int kMergedStride = kHeadVo + 4;  // floats: no bank conflicts between rows
};

// Softmax state of a row over one warp's keys: the reference, and the sum relative to it.
struct RowState {
  float reference;
  float sum;
};

template <class Traits>
struct DecodeStorage {
  // Slices of K and V as they are stored, a ring for each warp.
  alignas(128) unsigned char ring[Traits::kWarps][Traits::kStages][Traits::kSliceBytes];
  alignas(16) float merged[Traits::kWarps][Traits::kMergedRows][Traits::kMergedStride];
  RowState rows[Traits::kWarps][kWarpRows];
};

}  // namespace preflash::sm90
