// Compile-time shape of one fa2 kernel: tiles, layouts, copies. One type parameter: the variant's
// generated type, which carries kVariant and kTile.
#pragma once

#include <algorithm>
#include <cute/tensor.hpp>

#include "kernels/common/element.cuh"
#include "kernels/sm80/warp_mma.cuh"
#include "preflash/mask_range.h"
#include "preflash/variant.h"

namespace preflash::sm80 {

using namespace cute;

template <class V>
struct ForwardTraits {
  static constexpr Variant kVariant = V::kVariant;
  static constexpr TileShape kTile = V::kTile;
  static_assert(kVariant.q_dtype == kVariant.kv_dtype, "fa2 computes in one 16-bit dtype");

  using Element = preflash::Element<kVariant.q_dtype>;
  static constexpr int kTileM = kTile.m;
  static constexpr int kTileN = kTile.n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kHeadQk = kVariant.head_dim_qk;
  static constexpr int kHeadVo = kVariant.head_dim_vo;
  static constexpr int kThreads = kTile.warps * 32;
  static_assert(kHeadQk % kBlockColumns == 0 && kHeadVo % kBlockColumns == 0 && kHeadVo <= kHeadQk);
  static_assert(kTileM % (16 * kTile.warps) == 0 && kTileN % 16 == 0 && kTileN <= kThreads);

  // mma.sync.m16n8k16, warps stacked along M: warp w holds rows w * 16 + i * 16 * warps + [0, 16).
  using MmaOp = std::conditional_t<kVariant.q_dtype == DType::kFloat16,
                                   SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;
  using Mma = TiledMMA<MMA_Atom<MmaOp>, Layout<Shape<Int<kTile.warps>, _1, _1>>,
                       Tile<Int<16 * kTile.warps>, _16, _16>>;
  static constexpr int kMmaRows = 16 * kTile.warps;
  static constexpr int kMmaM = kTileM / kMmaRows;
  static constexpr int kRowsPerThread = 2 * kMmaM;
  // Fragments of Q (4 * kMmaM registers for each 16 columns) stay in registers as far as O, S and
  // the loop's own kLoopRegisters leave room; the rest is read again for every tile. Shared memory
  // is what binds at head_dim 256, and Q is a ninth of its traffic there, a fifth at 64
  // (docs/dev/experiments.md).
  static constexpr int kRegisters = std::min(255, 65536 / (kThreads * kTile.ctas_per_sm) / 8 * 8);
  static constexpr int kLoopRegisters = 79;
  static constexpr int kSpareRegisters =
      kRegisters - kLoopRegisters - kMmaM * (kHeadVo / 2 + kTileN / 2);
  static constexpr int kKeptQ = std::clamp(kSpareRegisters / (4 * kMmaM), 0, kHeadQk / 16);

  // 64 elements are 128 bytes: all banks once. The swizzle spreads the 8 rows of an ldmatrix over
  // them.
  using SwizzleAtom =
      decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
  using LayoutQ = decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kTileM>, Int<kHeadQk>>{}));
  using LayoutK = decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kTileN>, Int<kHeadQk>>{}));
  using LayoutV = decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kTileN>, Int<kHeadVo>>{}));
  using LayoutO = decltype(tile_to_shape(SwizzleAtom{}, Shape<Int<kTileM>, Int<kHeadVo>>{}));
  using CopyO = decltype(make_tiled_copy_C(
      Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>{}, Mma{}));

  // 8 threads fetch the 128 bytes of one row of a 64-column block, 16 bytes each.
  static constexpr int kElementsPerCopy = 16 / sizeof(Element);
  static constexpr int kThreadsPerRow = kBlockColumns / kElementsPerCopy;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static_assert(kTileN % kRowsPerPass == 0 && kTileM % kRowsPerPass == 0);
};

// Keys that one row keeps, [first, end): empty for rows past the request's end.
struct RowKeys {
  int first;
  int end;
};

// Byte offsets of a KV tile's rows from k and v of the KV head: found once per row by one thread.
// The rows that one thread copies, first_row + pass * kRowsPerPass, lie side by side.
template <class Traits>
struct KeyOffsets {
  static constexpr int kPasses = Traits::kTileN / Traits::kRowsPerPass;
  alignas(16) std::int64_t k[Traits::kRowsPerPass][kPasses];
  alignas(16) std::int64_t v[Traits::kRowsPerPass][kPasses];
};

template <class Traits>
struct SharedStorage {
  using Element = typename Traits::Element;
  // O leaves through Q's bytes: each warp overwrites only rows that it alone has read.
  union {
    alignas(128) Element q[cosize_v<typename Traits::LayoutQ>];
    alignas(128) Element o[cosize_v<typename Traits::LayoutO>];
  };
  alignas(128) Element k[Traits::kStages][cosize_v<typename Traits::LayoutK>];
  alignas(128) Element v[Traits::kStages][cosize_v<typename Traits::LayoutV>];
  RowKeys row_keys[Traits::kTileM];
  // Two: one tile's are written while a warp may still read the last one's.
  KeyOffsets<Traits> key_offsets[2];
};

}  // namespace preflash::sm80
