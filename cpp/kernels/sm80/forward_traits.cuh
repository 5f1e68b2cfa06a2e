// Compile-time shape of one fa2 kernel: tiles, layouts, copies. One type parameter: the variant's
// generated type, which carries kVariant and kTile.
#pragma once

#include <algorithm>
#include <cute/tensor.hpp>

#include "kernels/common/element.cuh"
#include "kernels/common/rotary.cuh"
#include "kernels/common/row_map.cuh"
#include "kernels/sm80/score_bias.cuh"
#include "kernels/sm80/warp_mma.cuh"
#include "preflash/mask_range.h"
#include "preflash/variant.h"

namespace preflash::sm80 {

using namespace cute;

// Segment of kernels that convert on load.
struct ConversionSegment : KernelSegment {
  RotaryFrequencies rotary;
};

// The second segment of V's two: a decode batch, whose few rows take a short tile, and no mask.
template <class V>
struct SecondSegment {
  static constexpr Variant kVariant = [] {
    Variant variant = V::kVariant;
    variant.tile_class = TileClass::kDecode;
    variant.mask = Mask::kBounds;
    return variant;
  }();
  static constexpr TileShape kTile = V::kSecondTile;
};

template <class V>
struct ForwardTraits {
  static constexpr Variant kVariant = V::kVariant;
  static constexpr TileShape kTile = V::kTile;

  // True if operands in memory may have another form than the products take.
  static constexpr bool kConverts = kVariant.load == Load::kConverted;
  // True if the kernel branches on options that a launch may lack.
  static constexpr bool kOptionsAtRunTime = options_at_run_time(kVariant);
  static_assert(!kConverts || kOptionsAtRunTime);
  using Segment = std::conditional_t<kConverts, ConversionSegment, KernelSegment>;
  static constexpr int kSegments = kVariant.segments == Segments::kTwo ? 2 : 1;
  using Params = LaunchParams<Segment, kSegments>;

  // Operands as they lie in shared memory, and in global memory unless they are converted on load;
  // P lives in registers.
  using ElementQ = Element<kVariant.q_dtype>;
  using ElementKv = Element<kVariant.kv_dtype>;
  using ElementP = ElementQ;
  using ElementO = ElementQ;
  static_assert(std::is_same_v<ElementKv, ElementQ>, "fa2 computes in one 16-bit dtype");

  static constexpr int kTileM = kTile.m;
  static constexpr int kTileN = kTile.n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kHeadQk = kVariant.head_dim_qk;
  static constexpr int kHeadVo = kVariant.head_dim_vo;
  static constexpr int kThreads = kTile.warps * 32;
  static_assert(kHeadQk % kBlockColumns<ElementQ> == 0 && kHeadQk % kBlockColumns<ElementKv> == 0);
  static_assert(kHeadVo % kBlockColumns<ElementO> == 0 && kHeadVo % kBlockColumns<ElementKv> == 0);
  // Up to 256 columns of O each warp has its own rows. For 512 its registers do not suffice: two
  // warps share rows, and each takes every other 16 columns of O and of S (row_peers.cuh).
  static constexpr int kColumnWarps = kHeadVo > 256 ? 2 : 1;
  static constexpr int kRowWarps = kTile.warps / kColumnWarps;
  static constexpr int kMmaColumns = 16 * kColumnWarps;
  // True if each of two warps has 8 keys of a tile of 16.
  static constexpr bool kNarrowKeys = kTileN < kMmaColumns;
  static constexpr int kWarpKeys = kNarrowKeys ? 8 : 16;  // side by side
  static_assert(kTileM % (16 * kRowWarps) == 0 && kTileN % (kWarpKeys * kColumnWarps) == 0 &&
                kTileN <= kThreads);

  // mma.sync.m16n8k16. Row warp w holds rows w * 16 + i * 16 * kRowWarps + [0, 16), column warp c
  // columns c * 16 + i * 16 * kColumnWarps + [0, 16).
  using MmaOp = std::conditional_t<std::is_same_v<ElementP, cutlass::half_t>,
                                   SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>;
  static constexpr int kMmaRows = 16 * kRowWarps;
  using MmaColumns =
      std::conditional_t<kColumnWarps == 1, _16,
                         Layout<Shape<_8, Int<kColumnWarps>, _2>, Stride<_1, _16, _8>>>;
  using Mma = TiledMMA<MMA_Atom<MmaOp>, Layout<Shape<Int<kRowWarps>, Int<kColumnWarps>, _1>>,
                       Tile<Int<kMmaRows>, MmaColumns, _16>>;
  using MmaS = std::conditional_t<
      kNarrowKeys,
      TiledMMA<MMA_Atom<MmaOp>, Layout<Shape<Int<kRowWarps>, Int<kColumnWarps>, _1>>,
               Tile<Int<kMmaRows>, Int<8 * kColumnWarps>, _16>>,
      Mma>;
  static constexpr int kMmaM = kTileM / kMmaRows;
  static constexpr int kRowsPerThread = 2 * kMmaM;
  // Fragments of Q (4 * kMmaM registers for each 16 columns) stay in registers as far as O, S and
  // the loop's own kLoopRegisters leave room; the rest is read again for every tile. Shared memory
  // is what binds at head_dim 256, and Q is a ninth of its traffic there, a fifth at 64
  // (docs/dev/experiments/fa2.md).
  static constexpr int kRegisters = std::min(255, 65536 / (kThreads * kTile.ctas_per_sm) / 8 * 8);
  // Above head_dim 256 P comes back whole.
  static constexpr int kLoopRegisters =
      (kConverts ? 96 : 79) + (kColumnWarps == 1 ? 0 : 24) + (kNarrowKeys ? 32 : 0);
  // Decode tiles of two-segment kernels: warps without rows idle and leave others the tensor core.
  static constexpr bool kIdleWarps = kSegments == 2 && kVariant.tile_class == TileClass::kDecode;
  static_assert(!kIdleWarps || (kColumnWarps == 1 && kTileM == kMmaRows));
  static constexpr int kSpareRegisters =
      kRegisters - kLoopRegisters - kMmaM * (kHeadVo / 2 + kTileN / 2) / kColumnWarps;
  static constexpr int kKeptQ = std::clamp(kSpareRegisters / (4 * kMmaM), 0, kHeadQk / 16);

  // The swizzle spreads the 8 rows of an ldmatrix, a chunk each, over the block's 128 bytes.
  template <class Element>
  using SwizzleAtom = decltype(composition(
      Swizzle<3, log_2(static_cast<unsigned>(kChunkBytes / sizeof(Element))), 3>{},
      Layout<Shape<_8, Int<kBlockColumns<Element>>>, Stride<Int<kBlockColumns<Element>>, _1>>{}));
  template <class Element, int kRows, int kColumns>
  using SmemLayout =
      decltype(tile_to_shape(SwizzleAtom<Element>{}, Shape<Int<kRows>, Int<kColumns>>{}));
  using LayoutQ = SmemLayout<ElementQ, kTileM, kHeadQk>;
  using LayoutK = SmemLayout<ElementKv, kTileN, kHeadQk>;
  using LayoutV = SmemLayout<ElementKv, kTileN, kHeadVo>;
  using LayoutO = SmemLayout<ElementO, kTileM, kHeadVo>;
  // The two neighbours that a thread has of each row of an 8-column accumulator leave together.
  template <class Element>
  using CopyO = decltype(make_tiled_copy_C(
      Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<2 * sizeof_bits_v<Element>>, Element>{},
      Mma{}));

  // The threads that fetch one row of a block, a chunk each.
  static constexpr int kThreadsPerRow = kBlockRowBytes / kChunkBytes;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  static_assert(kTileN % kRowsPerPass == 0 && kTileM % kRowsPerPass == 0);
};

// True if this launch has the feature; without run-time options, a compiled feature always is on.
template <class Traits>
__device__ __forceinline__ bool has_soft_cap(const KernelSegment& params) {
  return Traits::kVariant.logits == Logits::kSoftCap &&
         (!Traits::kOptionsAtRunTime || params.soft_cap > 0.0f);
}
template <class Traits>
__device__ __forceinline__ bool has_head_factors(const KernelSegment& params) {
  return Traits::kConverts &&
         (params.extras.scale_q != nullptr || params.extras.scale_k != nullptr);
}
// True if scores may change between Q K^T and the mask; most launches need only this branch.
template <class Traits>
__device__ __forceinline__ bool changes_scores(const KernelSegment& params) {
  return !Traits::kOptionsAtRunTime || has_soft_cap<Traits>(params) ||
         ScoreBias<Traits>::present(params) || has_head_factors<Traits>(params);
}
template <class Traits>
__device__ __forceinline__ Mask mask_of(const KernelSegment& params) {
  return Traits::kOptionsAtRunTime ? params.mask : Traits::kVariant.mask;
}

// Keys that one row keeps, [first, end): empty for rows past the request's end.
struct RowKeys {
  int first;
  int end;
};

// Row values and P that warps with shared rows exchange.
template <class Traits, int kColumnWarps = Traits::kColumnWarps>
struct PeerStorage {};
template <class Traits>
struct PeerStorage<Traits, 2> {
  // A chunk more than the row has: 8 rows of an ldmatrix then lie in different banks.
  static constexpr int kRowElements =
      Traits::kTileN + kChunkBytes / static_cast<int>(sizeof(typename Traits::ElementP));

  float of_row[2][Traits::kTileM];  // [column warp][row]
  alignas(16) typename Traits::ElementP p[Traits::kTileM][kRowElements];
};

// Byte offsets of a KV tile's rows from k and v of the KV head: found once per row by one thread.
// The rows that one thread copies, first_row + pass * kRowsPerPass, lie side by side.
template <class Traits>
struct KeyOffsets {
  static constexpr int kPasses = Traits::kTileN / Traits::kRowsPerPass;
  alignas(16) std::int64_t k[Traits::kRowsPerPass][kPasses];
  alignas(16) std::int64_t v[Traits::kRowsPerPass][kPasses];
};

// RoPE's frequencies and the steps of a lane's rotations through a tile, for each pair of
// dimensions; and the factor of a row's logits, the scales of its heads' fp8 operands.
template <class Traits, bool kConverts = Traits::kConverts>
struct ConversionTables {};
template <class Traits>
struct ConversionTables<Traits, true> {
  static constexpr int kPairs = Traits::kHeadQk / 2;
  alignas(16) std::uint64_t frequency[kPairs];
  alignas(16) Rotation row_step[kPairs];   // RotaryLanes::kRowsAtOnce rows
  alignas(16) Rotation span_step[kPairs];  // RotaryLanes::kSpan rows
  float row_factor[Traits::kTileM];
};

template <class Traits>
struct SharedStorage {
  using ElementQ = typename Traits::ElementQ;
  using ElementKv = typename Traits::ElementKv;
  using ElementO = typename Traits::ElementO;
  // O leaves through Q's bytes: each warp overwrites only rows that it alone, or with its peers,
  // has read. Row r of block b begins at the same byte in both, whatever their elements.
  static_assert(Traits::kHeadVo * sizeof(ElementO) <= Traits::kHeadQk * sizeof(ElementQ));
  union {
    alignas(128) ElementQ q[cosize_v<typename Traits::LayoutQ>];
    alignas(128) ElementO o[cosize_v<typename Traits::LayoutO>];
  };
  alignas(128) ElementKv k[Traits::kStages][cosize_v<typename Traits::LayoutK>];
  alignas(128) ElementKv v[Traits::kStages][cosize_v<typename Traits::LayoutV>];
  RowKeys row_keys[Traits::kTileM];
  [[no_unique_address]] typename ScoreBias<Traits>::Rows bias_rows;
  [[no_unique_address]] ConversionTables<Traits> conversion;
  [[no_unique_address]] PeerStorage<Traits> peers;
  // Two buffers: one tile's offsets are written while a warp may still read the previous tile's.
  KeyOffsets<Traits> key_offsets[2];
};

}  // namespace preflash::sm80
