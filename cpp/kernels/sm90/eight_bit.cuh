// Operands of 8 bits, multiplied as they are stored, with the hooks of WholeMma. V has been
// transposed on its way (VTransposer), and O is added up in float32: Hopper's tensor core
// keeps 13 bits behind the leading one of the largest of what it adds, and cuts the rest off. From
// 2^13 equal products on they vanish. An item's first tile is added up by itself, so that a large
// logit in it cuts off no later tile's products (EightBitSoftmax).
//
// That leaves a bias towards 0 where values have one sign: 1.1 % with random logits. Row sums by
// the same products lose as much, so that the bias cancels in the quotient. A factor of 1.25 gives
// products as many bits as values of e4m3 have on average: 1 would leave 60 % of the bias. Where
// signs of values vary O has no bias and gets that of the sums, about 1 % beside an error of 2.7 %.
// Measured: docs/dev/experiments/fp8-products.md.
#pragma once

#include "kernels/common/matrices.cuh"
#include "kernels/sm90/load_query.cuh"
#include "kernels/sm90/mma.cuh"
#include "kernels/sm90/speculative_softmax.cuh"
#include "kernels/sm90/work_items.cuh"

namespace preflash::sm90 {

// The online softmax of weights that are rounded to e4m3, whose numbers lie in [2^-9, 448].
//
// A tile's row maxima are found beside the products of O: speculation would fail in most tiles of
// logits as models have them. A row's reference moves when a weight would exceed the range.
//
// Whenever O has been added to its sums (EightBitMma), the reference of each row becomes the
// row max since the last time. Upwards that spares moves. Downwards it keeps weights: after a large
// logit, such as a query's with its own key, the weights of all other keys would be rounded to 0,
// and together they may outweigh it (docs/dev/experiments/fp8-products.md). Those of up to six
// tiles right behind it still are.
//
// Has the hooks of SpeculativeSoftmax. kAddsWeights: `sum` is the sum of weights before they are
// rounded, for the LSE. O is divided by the row sums of EightBitMma.
template <bool kAddsWeights>
struct EightBitSoftmax : SpeculativeSoftmax {
  // A logit that exceeds the reference by more moves it: the weight would be 2^8.7.
  static constexpr float kRoom = 4.7f / kLog2E;
  // A reference that has followed exceeds the row max by no more: a weight of 2^2.
  static constexpr float kSlack = 2.0f / kLog2E;
  // No reference follows further down than until `totals` are 2 to this, so that neither they nor O
  // overflow.
  static constexpr float kMaxSumExponent = 30;

  // Maxima of this thread's scores since O was added to its sums.
  float largest[kRows] = {-INFINITY, -INFINITY};
  bool moved = false;   // a reference of the warp moved for the present tile
  float factor[kRows];  // rescales O, if moved

  CUTE_DEVICE void begin(auto& mma, const auto& shift, const auto&) {
    *this = {};
    maxima(mma.rows_of_s(), shift, row_max_ref);
  }
  CUTE_DEVICE void update(auto& mma, const auto& shift, const auto& segment) {
    float tile_sum[kRows];
    exponentiate(mma.rows_of_s(), shift, mma.tOrP, tile_sum, segment.logits.scale_log2);
    for_rows([&](int r) { sum[r] += kAddsWeights ? tile_sum[r] : 0.0f; });
  }
  // NOTE: without the branch ptxas would move the wait for O to before the comparisons.
  CUTE_DEVICE void before_o(auto& mma, const auto& shift, const auto& segment, const auto& mask) {
    mask();
    const float room = returns_maxima(segment) ? 0.0f : kRoom * segment.x_per_logit;
    float tile_max[kRows];
    thread_maxima(mma.rows_of_s(), tile_max);
    bool exceeds = false;
    for_rows([&](int r) {
      tile_max[r] = shift.add_to(r, tile_max[r]);
      largest[r] = fmaxf(largest[r], tile_max[r]);
      exceeds |= tile_max[r] > row_max_ref[r] + room;
    });
    moved = __any_sync(0xffffffffu, exceeds);
    if (moved) {
      for_rows([&](int r) {
        const float row_max = quad_max(tile_max[r]);
        const float next = row_max > row_max_ref[r] + room ? row_max : row_max_ref[r];
        factor[r] = change_to(r, next, segment);
        sum[r] *= factor[r];
        row_max_ref[r] = next;
      });
    }
  }
  CUTE_DEVICE void after_o(auto& mma, const auto& segment) {
    if (moved) for_each_element(mma.rows_of_o(), [&](int r, int, float& x) { x *= factor[r]; });
    mma.add_up(*this, segment);
  }
  // O has been added to its sums. totals: the row sums so far, times kRowSumFactor, relative to the
  // references.
  CUTE_DEVICE void follow(const auto& segment, const float (&totals)[kRows]) {
    const float x_per_bit = segment.x_per_logit * (1.0f / kLog2E);
    for_rows([&](int r) {
      const float row_max = quad_max(largest[r]);
      const float highest = fmaf(kSlack, segment.x_per_logit, row_max);
      const float room = kMaxSumExponent - log2_approx(totals[r]);
      const float lowest = fmaxf(row_max, fmaf(-room, x_per_bit, row_max_ref[r]));
      const float next = fmaxf(fminf(row_max_ref[r], highest), lowest);
      if (next != row_max_ref[r] && row_max != -INFINITY && !returns_maxima(segment)) {
        sum[r] *= change_to(r, next, segment);
        row_max_ref[r] = next;
      }
      largest[r] = -INFINITY;
    });
  }
  CUTE_DEVICE void update(auto& mma, const auto& shift, const auto& segment, const auto&) {
    update(mma, shift, segment);
  }

 private:
  // True if row maxima are output: the references must then be the maxima.
  CUTE_DEVICE static bool returns_maxima(const auto& segment) {
    return segment.max_sum <= max_sum(LseForm::kMaxAndSum, DType::kFloat8E4M3);
  }
  // Returns the factor that rescales sums to reference `next`. No branch, unlike
  // change_of_reference(): for a row without keys the product is -inf, and its sum is 0.
  CUTE_DEVICE float change_to(int r, float next, const auto& segment) const {
    const float scale_log2 = segment.logits.scale_log2;
    const float bits = __fmul_rn(row_max_ref[r], scale_log2) - __fmul_rn(next, scale_log2);
    return next == row_max_ref[r] ? 1.0f : exp2_approx(bits);
  }
};

template <class Traits>
struct EightBitMma : WholeMma<Traits> {
  using Base = WholeMma<Traits>;

  static constexpr int kTilesAtOnce = 6;
  static constexpr int kParts = Traits::kPartsO;
  static constexpr int kShared = Traits::kSharedSums;

  // References of the sums. From prepare_o() on, the sums' factors to the item's last references.
  float row_max_ref[2];
  float4 sums[kParts - kShared];  // of the last parts
  int tiles;                      // in the accumulators
  bool has_sums = false;

  using Base::Base;

  // The first tile goes to the sums on its own, so `tiles` begins one below its limit.
  CUTE_DEVICE void begin_item(const ItemState& item) {
    Base::begin_item(item);
    tiles = item.begins_late ? 0 : kTilesAtOnce - 1;
  }

  CUTE_DEVICE void add_up(auto& softmax, const auto& segment) {
    this->first_pv = GMMA::ScaleOut::One;
    if (++tiles < kTilesAtOnce) return;
    prepare_o(softmax, segment);
    take_sums();
    Tensor parts = recast<float4>(this->tOrO);
    CUTE_UNROLL
    for (int i = 0; i < kParts; ++i) (i < kShared ? shared_sum(i) : sums[i - kShared]) = parts(i);
    for_rows([&](int r) { row_max_ref[r] = softmax.row_max_ref[r]; });
    this->first_pv = GMMA::ScaleOut::Zero;
    tiles = 0;
    has_sums = true;
    softmax.follow(segment, {parts(kParts - 1).x, parts(kParts - 1).z});
  }
  template <class Softmax, class Segment>
  CUTE_DEVICE void prepare_o(const Softmax& softmax, const Segment& segment) {
    for_rows([&](int r) {
      row_max_ref[r] = Softmax::change_of_reference(row_max_ref[r], softmax.row_max_ref[r],
                                                    segment.logits.scale_log2);
    });
  }
  CUTE_DEVICE void finish_o() {
    take_sums();
    has_sums = false;
  }

 private:
  CUTE_DEVICE float4& shared_sum(int part) const {
    return this->smem.sums[(this->warpgroup * kShared + part) * kWarpgroupThreads + this->thread];
  }
  // Adds the sums to O. Four are read while the four before are added.
  CUTE_DEVICE void take_sums() {
    if (!__any_sync(0xffffffffu, has_sums)) return;
    constexpr int kGroup = 4;
    Tensor parts = recast<float4>(this->tOrO);
    auto add = [&](int part, const float4& sum) {
      const float4 o = parts(part);
      parts(part) = float4{fmaf(sum.x, row_max_ref[0], o.x), fmaf(sum.y, row_max_ref[0], o.y),
                           fmaf(sum.z, row_max_ref[1], o.z), fmaf(sum.w, row_max_ref[1], o.w)};
    };
    float4 read[2][kGroup];
    CUTE_UNROLL
    for (int i = 0; i < min(kGroup, kShared); ++i) read[0][i] = shared_sum(i);
    CUTE_UNROLL
    for (int part = kShared; part < kParts; ++part) add(part, sums[part - kShared]);
    CUTE_UNROLL
    for (int first = 0; first < kShared; first += kGroup) {
      const auto& now = read[first / kGroup % 2];
      auto& next = read[(first / kGroup + 1) % 2];
      CUTE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (first + kGroup + i < kShared) next[i] = shared_sum(first + kGroup + i);
      }
      CUTE_UNROLL
      for (int i = 0; i < min(kGroup, kShared - first); ++i) add(first + i, now[i]);
    }
  }
};

// V transposed: wgmma takes both operands of 8 bits with the summed dimension contiguous, and V
// arrives with one row per key. A producer warpgroup turns each tile, from the ring that TMA or
// cp.async fills to the ring that the products read.
//
// P needs no exchange among lanes: lane q of a quad has S of columns 8 j + 2 q and one more, and as
// an operand takes four summed elements 4 q ... 4 q + 3 of 16. So element 4 q + 2 h + i of P's 16
// is key 8 h + 2 q + i, and V's keys come in that order, which is just what two transposed 8 x 8
// matrices of 16 bits give a lane, two dimensions of two keys each:
//
//   ldmatrix.trans  keys 2 q, 2 q + 1 (h = 0) and 8 + 2 q, 9 + 2 q (h = 1) of dimensions 2 c,
//                   2 c + 1
//   prmt            the four keys of dimension 2 c, and those of 2 c + 1
//   stmatrix        as bytes 4 q ... 4 q + 3 of a piece of 16 of these dimensions' rows

// A warp's part of a tile: 32 keys, all dimensions.
// A matrix is stored to 8 rows, which must differ modulo 8 to lie in different banks: lanes
// 0 to 15 (c < 4) give the first matrix an even dimension, the others an odd one.
template <class Traits>
struct VTransposer {
  static constexpr int kPieceBytes = 16;
  static constexpr int kPieces = Traits::kHeadVo / kPieceBytes;  // of a key's row
  static constexpr int kAtOnce = 4;                              // so that reads overlap
  static constexpr int kTileBytes = Traits::kTileN * (Traits::kHeadVo + Traits::kRowSumColumns);
  static_assert(Traits::kTileN == 128 && Traits::kRowVo == kBlockRowBytes &&
                kPieces % kAtOnce == 0);

  std::uint32_t source;         // of this lane's row of V, from the tile's begin on
  std::uint32_t target;         // of this lane's row of V^T, from the tile's begin on, its piece
  std::uint32_t first, second;  // byte selectors

  CUTE_DEVICE VTransposer(int warp, int lane) {
    const int matrix = lane / 8, c = lane % 8;
    const int row = 2 * c + ((c >= 4) != (matrix % 2 == 1));  // dimension of 16
    const int piece = 2 * warp + matrix / 2;                  // of 16 keys
    source = (warp * 32 + lane) * kBlockRowBytes + c * kPieceBytes;
    target = row * kBlockRowBytes + (piece ^ row % 8) * kPieceBytes;
    first = lane < 16 ? 0x6420 : 0x7531;
    second = lane < 16 ? 0x7531 : 0x6420;
  }

  // Calls read() when nothing is to be read any more.
  CUTE_DEVICE void transpose(std::uint32_t from, std::uint32_t to, const auto& read) const {
    CUTE_UNROLL
    for (int piece = 0; piece < kPieces; piece += kAtOnce) {
      std::uint32_t r[kAtOnce][4];
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        load_transposed(r[i], (from + source) ^ (piece + i) * kPieceBytes);
      }
      if (piece + kAtOnce == kPieces) read();
      CUTE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        store_matrices(to + target + (piece + i) * (16 * kBlockRowBytes),
                       __byte_perm(r[i][0], r[i][1], first), __byte_perm(r[i][0], r[i][1], second),
                       __byte_perm(r[i][2], r[i][3], first), __byte_perm(r[i][2], r[i][3], second));
      }
    }
  }
};

// Writes the rows of V^T whose products with P are row sums. They follow V's own in each buffer.
template <class Traits>
CUTE_DEVICE void fill_row_sum_columns(SharedStorage<Traits>& smem) {
  constexpr int kTileBytes = VTransposer<Traits>::kTileBytes;
  constexpr int kBytes = Traits::kTileN * Traits::kRowSumColumns;
  static_assert(Traits::kRowSumFactor == 1.25f && kBytes == 8 * kWarpgroupThreads);
  constexpr std::uint32_t kFactors = 0x3a3a3a3a;  // four times 1.25 in e4m3
  CUTE_UNROLL
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    auto* rows = reinterpret_cast<uint2*>(smem.v + (stage + 1) * kTileBytes - kBytes);
    rows[threadIdx.x % kWarpgroupThreads] = {kFactors, kFactors};
  }
}

// One warpgroup transposes all tiles of a CTA's items, and quantises Q of 16 bits.
template <class Traits>
CUTE_DEVICE void transpose_values(const HopperSegment& segment, SharedStorage<Traits>& smem) {
  fill_row_sum_columns(smem);  // the first tile's fence and arrivals publish them, too
  const VTransposer<Traits> transposer(threadIdx.x % kWarpgroupThreads / 32, lane_id());
  QueryQuantizer<Traits> query{smem, segment.q_dtype};
  ItemReader<Traits> items{smem};
  ProducerPipelineState<Traits::kStages> next;  // of both rings
  auto read_item = [&] {
    const ItemState* state = items.wait();
    if (state == nullptr) return 0;
    const int tiles = warp_uniform(state->tiles.count());
    if constexpr (Traits::kQuantizesQ) query.quantize(warp_uniform(state->num_rows));
    items.release();
    return tiles;
  };
  // With TMA the next item is read, and its Q quantised, behind an item's first tile. NOTE:
  // gathering warps load that Q behind the item's last tile.
  const bool reads_ahead = Traits::kQuantizesQ && segment.box.kv_rows > 0;
  constexpr int kUnread = -1;
  int tiles = 0, next_tiles = kUnread;  // left of this item; of the next one
#pragma unroll 1
  for (;;) {
    if (next_tiles == kUnread && (tiles == 0 || reads_ahead)) next_tiles = read_item();
    if (tiles == 0) {
      if (next_tiles == 0) return;
      tiles = next_tiles;
      next_tiles = kUnread;
    }
    const int stage = next.index();
    smem.raw_ring.full[stage].wait(next.phase());
    smem.barriers.v.empty[stage].wait(next.phase() ^ 1);
    transposer.transpose(cast_smem_ptr_to_uint(smem.raw + stage * Traits::kTileN * Traits::kRowVo),
                         cast_smem_ptr_to_uint(smem.v + stage * VTransposer<Traits>::kTileBytes),
                         [&] {
                           __syncwarp();
                           release(smem.raw_ring.empty[stage]);
                         });
    publish_writes(smem.barriers.v.full[stage]);
    next.advance();
    --tiles;
  }
}

}  // namespace preflash::sm90
