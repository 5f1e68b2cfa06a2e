// The compile-time shape of a decode kernel, and the loads of its warps: each walks its slices of
// keys and loads them by cp.async, some slices ahead, into a ring that no other warp reads.
#pragma once

#include <cutlass/arch/arch.h>

#include "kernels/sm90/forward_params.cuh"
#include "kernels/sm90/load_gather.cuh"
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
  static constexpr bool kQuantizesQ = false;
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
  float row_max_ref;
  float sum;
};

template <class Traits>
struct DecodeStorage {
  // Slices of K and V as they are stored, a ring for each warp.
  alignas(128) unsigned char ring[Traits::kWarps][Traits::kStages][Traits::kSliceBytes];
  alignas(16) float merged[Traits::kWarps][Traits::kMergedRows][Traits::kMergedStride];
  RowState rows[Traits::kWarps][kWarpRows];
};

// Item `index` of the launch, with its tiles counted in slices.
template <class Traits, class Params>
CUTE_DEVICE ItemState read_decode_item(const Params& params, int index) {
  const HopperSegment& segment = params.segments[0];
  ItemState state;
  state.item = params.items[index];
  state.request = params.request(state.item.request);
  state.num_rows = query_grid<Traits>(segment).rows(state.request, state.item.row_begin).count;
  state.tiles = {};
  if (state.num_rows <= 0) return state;
  const ItemView view = ItemView::of(segment, state);
  state.tiles = tiles_of_rows<Traits>(view, 0, state.num_rows);
  state.keys = keys_of_item(view);
  return state;
}

// Byte offsets of pieces in a slice. 8 lanes access every bank once: of K, 4 pieces of 16 bytes in
// 2 neighbouring rows, of V, 2 pieces (or half ones) in every other of 8 rows.
template <int kRowBytes>
struct SlicePlaces {
  static constexpr int kPieces = kRowBytes / 16;

  CUTE_DEVICE static int of_k(int row, int piece) {
    return at(row, piece, kPieces % 8 == 0 ? row % 2 * 4 : 0);  // in whole lines
  }
  CUTE_DEVICE static int of_v(int row, int piece) { return at(row, piece, row / 2 % 4 * 2); }

 private:
  CUTE_DEVICE static int at(int row, int piece, int turn) {
    return ((row * kPieces + piece) ^ turn) * 16;
  }
};

template <class Traits>
struct SliceLoader {
  static constexpr int kTileN = Traits::kTileN;
  using Params = LaunchParams<HopperSegment>;

  const Params& params;
  // The warp's ring, [stage, slice]. NOTE: with a uniform register in the address ptxas 13.0
  // encodes a copy with a cache policy wrongly (illegal instruction). So 0 is added, as each lane's
  // own number.
  std::uint32_t ring;
  int warp;
  int index;  // of the item after the one at hand
  int end;
  ItemKeys item = {};
  int slice = -1;  // to be requested next
  int first = 0;   // of the item
  int stage = 0;
  bool any = true;    // such a slice exists
  KeySlot slot = {};  // of row lane_id() of it

  CUTE_DEVICE SliceLoader(const Params& params, unsigned char* ring, int warp, int begin, int end)
      : params(params),
        ring(cute::cast_smem_ptr_to_uint(ring) + cutlass::arch::LaneId() - lane_id()),
        warp(warp),
        index(begin),
        end(end) {
    find_slice();
  }

  // Requests the next slice: a group of copies, an empty one where there is none.
  CUTE_DEVICE void request() {
    if (any) {
      const std::uint32_t target = ring + stage * Traits::kSliceBytes;
      copy<Operand::kK, Traits::kHeadQk>(segment().k, segment().head_dim_qk, target);
      copy<Operand::kV, Traits::kHeadVo>(segment().v, segment().head_dim_vo,
                                         target + Traits::kSliceBytesK);
      slice -= Traits::kWarps;
      find_slice();
    }
    cute::cp_async_fence();
    stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
  }

 private:
  CUTE_DEVICE const HopperSegment& segment() const { return params.segments[0]; }

  // Goes on to the items that follow until one has a slice for this warp.
  CUTE_DEVICE void find_slice() {
    while (slice < first) {
      if (index >= end) {
        any = false;
        return;
      }
      ItemState state = read_decode_item<Traits>(params, index++);
      item = ItemKeys::of(state);
      first = state.tiles.begin;
      slice = state.tiles.end - 1 - warp;
    }
    slot = find_slot_within(segment(), item, slice * kTileN + lane_id() % kTileN);
  }

  template <Operand kOperand, int kHead>
  CUTE_DEVICE void copy(const KvTensor& tensor, int head_dim, std::uint32_t target) const {
    constexpr int kRowBytes = kHead * Traits::kStoredBytes;
    using Places = SlicePlaces<kRowBytes>;
    constexpr int kLanes = std::min(32, Places::kPieces & -Places::kPieces);
    using Copies = RowCopies<Traits, kTileN, kRowBytes, kLanes, !Traits::kConverts>;
    Copies::template copy<Traits::kStoredBytes>(
        item, slice * kTileN, 0, tensor, head_dim, &slot, [&](int pass, int i) {
          const int row = pass * Copies::kRowsAtOnce + Copies::lane_row();
          const int piece = i * kLanes + lane_id() % kLanes;
          return target +
                 (kOperand == Operand::kK ? Places::of_k(row, piece) : Places::of_v(row, piece));
        });
  }
};

}  // namespace preflash::sm90
