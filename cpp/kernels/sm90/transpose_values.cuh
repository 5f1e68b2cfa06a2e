// V transposed for products of 8 bits: wgmma takes both operands of these with the summed dimension
// contiguous, and V arrives with one row per key. A producer warpgroup of its own turns each tile,
// from the ring that TMA or cp.async fills to the ring that the products read.
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
#pragma once

#include "kernels/common/matrices.cuh"
#include "kernels/sm90/work_items.cuh"

namespace preflash::sm90 {

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

// One warpgroup transposes all tiles of a CTA's items.
template <class Traits>
CUTE_DEVICE void transpose_values(SharedStorage<Traits>& smem) {
  fill_row_sum_columns(smem);  // the first tile's fence and arrivals publish them, too
  const VTransposer<Traits> transposer(threadIdx.x % kWarpgroupThreads / 32, lane_id());
  ItemReader<Traits> items{smem};
  ProducerPipelineState<Traits::kStages> next;  // of both rings
  while (const ItemState* state = items.wait()) {
    const int tiles = warp_uniform(state->tiles.count());
    items.release();
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const int stage = next.index();
      smem.raw_ring.full[stage].wait(next.phase());
      smem.barriers.v.empty[stage].wait(next.phase() ^ 1);
      transposer.transpose(
          cast_smem_ptr_to_uint(smem.raw + stage * Traits::kTileN * Traits::kRowVo),
          cast_smem_ptr_to_uint(smem.v + stage * VTransposer<Traits>::kTileBytes), [&] {
            __syncwarp();
            release(smem.raw_ring.empty[stage]);
          });
      publish_writes(smem.barriers.v.full[stage]);
      next.advance();
    }
  }
}

}  // namespace preflash::sm90
