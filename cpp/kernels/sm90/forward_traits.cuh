// The compile-time shape of one fa3 kernel: roles, tiles, registers, layouts. README.md beside this
// file explains the whole kernel.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/element.cuh"
#include "preflash/variant.h"

namespace preflash::sm90 {

using namespace cute;

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = 4;
inline constexpr int kWarpgroupRows = 64;   // of one wgmma
inline constexpr int kWarpRows = 16;        // of one warp's part of it
inline constexpr int kBlockRowBytes = 128;  // one row of a swizzle atom and of a TMA box
inline constexpr int kMaxConsumers = 4;
inline constexpr int kMaxSharedBytes = 227 * 1024;  // of one CTA
inline constexpr int kOtherBytes = 2048;            // barriers, items

// Columns of one block of an operand in shared memory.
template <class Element>
inline constexpr int kBlockColumns = kBlockRowBytes / sizeof(Element);

// V: the variant's generated type.
template <class V>
struct ForwardTraits {
  static constexpr Variant kVariant = V::kVariant;
  static constexpr TileShape kTile = V::kTile;

  // True if operands in memory may be 8-bit or not yet rotated.
  static constexpr bool kConverts = kVariant.load == Load::kConverted;
  // True if 8-bit operands are multiplied as stored, with V transposed (eight_bit.cuh).
  static constexpr bool kTransposesV = size_of(kVariant.q_dtype) == 1;
  // True if Q arrives in 16 bits and becomes e4m3 on its way (QueryQuantizer).
  static constexpr bool kQuantizesQ = requires { V::kQuantizesQ; };
  // True if a row's O is added up in groups of tiles that begin with its query tile's first one
  // (eight_bit.cuh). A query tile begins in one of two tiles of keys (begins_late()).
  static constexpr bool kAlignsQueryTiles = kTransposesV;
  static_assert(!kAlignsQueryTiles || kTile.m <= kTile.n);
  // V^T has 8 more rows, all of kRowSumFactor, and O 8 more columns: each is the row sum of P as
  // the tensor core rounds it, times that factor (eight_bit.cuh).
  static constexpr int kRowSumColumns = kTransposesV ? 8 : 0;
  static constexpr float kRowSumFactor = 1.25f;
  // True if the softmax adds up P before it is rounded, for an LSE. It takes 4 % of a tile's clocks
  // (measured in a mock).
  static constexpr bool kAddsWeights = !requires { V::kWithoutLse; };
  // True if the caller may pass factors of heads and choose O's dtype.
  static constexpr bool kTakes8Bits = kConverts || kTransposesV;

  static constexpr bool kCaps = kVariant.logits == Logits::kSoftCap;
  // True if soft cap, bias and mask bits are options of the launch.
  static constexpr bool kOptionsAtRunTime = options_at_run_time(kVariant);
  // True if the softmax caps scores (soft_cap.cuh). With more columns of O the tensor core is
  // busier than the special-function unit, and whole tiles are capped during O += P V.
  static constexpr bool kCapsInSoftmax = kCaps && !kOptionsAtRunTime && kVariant.head_dim_vo <= 128;

  static constexpr int kSegments = kVariant.segments == Segments::kTwo ? 2 : 1;
  // Rotary tables and readers of slices are one segment's, and both announce tiles, or neither.
  static_assert(kSegments == 1 ||
                (!kConverts && kVariant.head_dim_vo <= 256 && kVariant.mask == Mask::kBounds));

  // True if 8-bit operands are dequantised to this kernel's dtype.
  static constexpr bool kWidens =
      kConverts && (kVariant.q_dtype == DType::kFloat16 ||
                    traits_of(kVariant.family).dequantization == Dequantization::kToQueries);
  // True if queries may exceed the range of the products' dtype: a row that does not fit is scaled
  // by a power of two of its own (load_query.cuh).
  __host__ __device__ static constexpr bool narrows_query(DType q_dtype) {
    return kConverts && kVariant.q_dtype == DType::kFloat16 && q_dtype == DType::kBFloat16;
  }

  using ElementQ = Element<kVariant.q_dtype>;
  using ElementKv = Element<kVariant.kv_dtype>;  // as K and V are multiplied
  using ElementP = ElementQ;                     // dtype of rounded P
  using ElementO = conditional_t<kTransposesV, half_t, ElementQ>;
  // wgmma multiplies operands of one type, and takes V one row per key in 16 bits alone.
  static_assert(is_same_v<ElementQ, ElementKv> && is_same_v<ElementP, ElementKv>,
                "fa3 multiplies in one dtype");
  static_assert(sizeof(ElementO) == 2 && !(kConverts && kTransposesV));

  static constexpr int kHeadQk = kVariant.head_dim_qk;
  static constexpr int kHeadVo = kVariant.head_dim_vo;

  // A warpgroup's registers hold 256 columns of O. With more, each CTA of a cluster computes some
  // of the columns of O, and S for some of the keys of a tile.
  static constexpr int kPartVo = kHeadVo <= 256 ? kHeadVo : 256;
  static constexpr int kClusterSize = kHeadVo / kPartVo;
  static_assert(kHeadVo % kPartVo == 0 && kClusterSize <= 2);

  static constexpr int kTileM = kTile.m;
  static constexpr int kItemTileN = kTile.n;             // keys of an item's tile
  static constexpr int kTileN = kTile.n / kClusterSize;  // of a CTA's part of S, and of buffers
  static constexpr int kStages = kTile.stages;

  // Whole tiles of K and V then have no room beside Q, nor have raw ones of more than 128 columns:
  // they arrive in slices, through one ring.
  static constexpr bool kSliced = kClusterSize > 1 || (kConverts && kHeadVo > 128);
  static constexpr int kSliceColumns = 128;
  static constexpr int kSliceSlots = kClusterSize == 1 ? 8 : kConverts ? 4 : 5;  // as many as fit
  static constexpr int kSlicesV = kPartVo / kSliceColumns;
  static constexpr int kSliceElements = kTileN * kSliceColumns;
  static_assert(!kSliced || (kHeadQk % kSliceColumns == 0 && kSlicesV == 2));

  // The second producer warpgroup converts, or transposes V; each consumer has 64 rows.
  static constexpr int kConsumers = kTileM / kWarpgroupRows;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroupThreads;
  static constexpr int kProducerWarps = kTile.warps - kConsumerWarps;
  static constexpr int kProducers = kProducerWarps / kWarpgroupWarps;
  static constexpr int kThreads = kTile.warps * 32;
  static_assert(kTileM % kWarpgroupRows == 0 && kProducerWarps % kWarpgroupWarps == 0);
  static_assert(kProducers == (kTransposesV || kConverts ? 2 : 1));
  static_assert(kConsumers == 2 || kConsumers == kMaxConsumers);
  // Rows arrive in whole blocks: 64 columns of 8 bits and 64 zeros.
  static constexpr int kRowQk = std::max(kHeadQk, kBlockColumns<ElementKv>);
  static constexpr int kRowVo = std::max(kHeadVo, kBlockColumns<ElementKv>);
  static constexpr int kBlocksQk = kRowQk / kBlockColumns<ElementKv>;
  static constexpr int kBlocksV = kRowVo / kBlockColumns<ElementKv>;
  static constexpr int kBlocksO = kPartVo / kBlockColumns<ElementO>;
  static_assert(kRowQk % kBlockColumns<ElementKv> == 0 && kRowVo % kBlockColumns<ElementKv> == 0);
  static_assert(kPartVo % kBlockColumns<ElementO> == 0);
  static_assert(kTileN % 16 == 0 && kTileN <= 256);
  // Most TMA boxes of a K or V tile, of 8 rows or more. Each lane finds one box's coordinates.
  static constexpr int kMaxBoxes = kTileN / 8;

  // True if a producer warp announces tiles (tile_ring.cuh).
  static constexpr bool kHasMaskBits = kVariant.mask == Mask::kCustom;
  static constexpr int kTileSlots = 4 * kStages;

  // True if a warpgroup skips tiles that none of its rows touches, such as those of a causal item's
  // highest keys, which come first. Only narrow tiles leave it such tiles, and a ring of slices
  // lets no warpgroup run ahead. NOTE: a warpgroup that skips an item's first tiles still holds V
  // of the item before, while the other warpgroups need a buffer for each of those tiles: V must
  // have that many more buffers.
  static constexpr bool kSkipsTiles = !kSliced && !kHasMaskBits && kTileN <= kWarpgroupRows &&
                                      (kConsumers - 1) * kWarpgroupRows <= (kStages - 1) * kTileN;

  // True if a warpgroup may compute nothing of an item that has no rows for it. A warpgroup that
  // skips tiles computes one anyway. Slices, and tiles of a custom mask, would have to be passed by
  // other means.
  static constexpr bool kMayIdle = kSegments > 1 || !(kSkipsTiles || kSliced || kHasMaskBits);

  // K and V as stored, where they are converted: a tile of both in 8 bits, or of K alone in 16 (V
  // then needs no conversion); or slices in 8 bits.
  static constexpr int kRawSlices = 2;
  static constexpr int kRawBytes = !kConverts ? 0
                                   : kSliced  ? kRawSlices * kSliceElements
                                              : 2 * kTileN * std::max(kHeadQk, kBlockRowBytes);
  static constexpr int kPairs = kHeadQk / 2;  // of dimensions that RoPE rotates

  // With two buffers the next item's Q is loaded during this item's last tiles, with one only
  // during its very last. Where Q is converted there is one.
  static constexpr int kBytesQ = kTileM * kRowQk * sizeof(ElementQ);
  static constexpr int kBytesKv = kTileN * (kRowQk + kHeadVo + kRowSumColumns) * sizeof(ElementKv);
  static constexpr int kBytesO = kConsumerWarps * kWarpRows * kBlockRowBytes;
  // A thread's part of O: two columns of each of its rows. The float32 sums of the first
  // kSharedSums parts lie in shared memory: beside S, P and O the registers have no room for all.
  static constexpr int kPartsO = (kPartVo + kRowSumColumns) / 8;
  static constexpr int kSharedSums = kTransposesV && kPartVo > 64 ? kPartsO - 8 : 0;
  // V as it arrives, and O's sums.
  static constexpr int kBytesV =
      kTransposesV
          ? kStages * kTileN * kRowVo + kConsumerThreads * kSharedSums * int{sizeof(float4)}
          : 0;
  static constexpr int kBytesRawQ = kQuantizesQ ? kTileM * kHeadQk * 2 : 0;
  static constexpr int kBytesBesideQ =
      kStages * kBytesKv + kBytesV + kBytesRawQ + kBytesO + kOtherBytes;
  static constexpr int kQStages =
      !kConverts && 2 * kBytesQ + kBytesBesideQ <= kMaxSharedBytes ? 2 : 1;

  // True if an item's last step prepares the transition to the next item; else its first step does
  // (measured: docs/dev/experiments/fa3-main-loop.md). A custom mask allows only the last step.
  static constexpr bool kPreparesInLastStep = !kSkipsTiles && !kSliced;

  // True if an item's first P is computed before the previous item's O is stored, so that the store
  // delays no product. At head_dim 256 that costs more than it gains (measured: same page). In a
  // cluster it must be false: the exchange of P waits for the mailbox, in which the other CTA
  // stages O until it has stored it.
  static constexpr bool kSoftmaxBeforeStore = kPartVo <= 128;
  static_assert(!kSoftmaxBeforeStore || kClusterSize == 1);

  // The launch bounds divide the registers evenly; setmaxnreg moves the producers' to consumers.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kTile.ctas_per_sm) / 8 * 8;
  // Warpgroups that convert or transpose take more registers, from the consumers.
  static constexpr int kTakenRegisters =
      kTransposesV                                                                        ? 8
      : !kConverts                                                                        ? 0
      : kSliced && (kHasMaskBits || (kClusterSize > 1 && (kOptionsAtRunTime || kWidens))) ? 16
                                                                                          : 24;
  static constexpr int kMostRegisters = kConsumers == 4 ? 112 : kHeadVo <= 128 ? 224 : 232;
  static constexpr int kConsumerRegisters = kMostRegisters - kTakenRegisters;
  static constexpr int kProducerRegisters =
      (kLaunchRegisters * (kConsumers + kProducers) - kConsumers * kConsumerRegisters) /
      kProducers / 8 * 8;
  static_assert(kProducerRegisters >= 32);

  // P comes from registers, Q, K and V from shared memory, V with one row per key or transposed.
  using ShapeQk = Shape<_64, Int<kTileN>, Int<kHeadQk>>;
  using MmaQk =
      decltype(make_tiled_mma(GMMA::ss_op_selector<ElementQ, ElementKv, float, ShapeQk>()));
  static constexpr int kMmaColumnsPv = kSliced ? kSliceColumns : kHeadVo + kRowSumColumns;
  using MmaPv = decltype(make_tiled_mma(
      GMMA::rs_op_selector<ElementP, ElementKv, float, Shape<_64, Int<kMmaColumnsPv>, Int<kTileN>>,
                           GMMA::Major::K, kTransposesV ? GMMA::Major::K : GMMA::Major::MN>()));

  // True if ALiBi's bias is one more step of S = Q K^T (AlibiProduct), in bfloat16 for its range.
  // Wider products leave time for an FMA a score; a soft cap or factors come before the bias.
  static constexpr bool kBiasByProduct =
      kVariant.position == Position::kAlibi && !kCaps && !kTakes8Bits && kHeadQk <= 128;
  using MmaBias = decltype(make_tiled_mma(
      GMMA::rs_op_selector<bfloat16_t, bfloat16_t, float, Shape<_64, Int<kTileN>, _16>>()));
  using LayoutSteps =
      decltype(tile_to_shape(GMMA::Layout_K_INTER_Atom<bfloat16_t>{}, Shape<Int<kTileN>, _16>{}));
  using BiasSteps = array_aligned<bfloat16_t, kTileN * 16, 128>;

  // Blocks of kBlockColumns, each with all rows of the tile: the layout that TMA boxes write.
  using AtomQk = GMMA::Layout_K_SW128_Atom<ElementKv>;
  using AtomV = conditional_t<kTransposesV, AtomQk, GMMA::Layout_MN_SW128_Atom<ElementKv>>;
  using StepV = conditional_t<kTransposesV, Step<_1, _2, _3>, Step<_2, _1, _3>>;
  using LayoutQ =
      decltype(tile_to_shape(AtomQk{}, Shape<Int<kTileM>, Int<kRowQk>, Int<kQStages>>{}));
  using LayoutK =
      decltype(tile_to_shape(AtomQk{}, Shape<Int<kTileN>, Int<kRowQk>, Int<kStages>>{}));
  using LayoutV = decltype(tile_to_shape(
      AtomV{}, Shape<Int<kHeadVo + kRowSumColumns>, Int<kTileN>, Int<kStages>>{},
      StepV{}));  // V^T: (d_vo, tile_n, stages)
  using LayoutSliceK =
      decltype(tile_to_shape(AtomQk{}, Shape<Int<kTileN>, Int<kSliceColumns>, Int<kSliceSlots>>{}));
  using LayoutSliceV = decltype(tile_to_shape(
      AtomV{}, Shape<Int<kSliceColumns>, Int<kTileN>, Int<kSliceSlots>>{}, StepV{}));
};

// This CTA's part of an item: its index, the first of its columns of O, and its keys of a tile of
// S, in units of kTileN keys.
template <class Traits>
CUTE_DEVICE int cta_rank() {
  return Traits::kClusterSize == 1 ? 0 : static_cast<int>(blockIdx.x) % Traits::kClusterSize;
}
template <class Traits>
CUTE_DEVICE int first_column() {
  return cta_rank<Traits>() * Traits::kPartVo;
}
template <class Traits>
CUTE_DEVICE int own_tile(int tile) {
  return tile * Traits::kClusterSize + cta_rank<Traits>();
}

}  // namespace preflash::sm90
