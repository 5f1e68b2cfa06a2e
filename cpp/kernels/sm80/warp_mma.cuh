// Warp-level pieces of the two products: ldmatrix addresses and mma.sync on raw registers.
//
// CuTe's tiled copies recompute the swizzle for every tile when registers are scarce (25
// instructions a product); here an operand costs one base address per thread, and the swizzle is
// one XOR, because a block's rows are 128 bytes: address(row, chunk) = base + row * 128 +
// ((chunk ^ row % 8) * 16).
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "kernels/common/matrices.cuh"
#include "preflash/types.h"

namespace preflash::sm80 {

inline constexpr int kChunkBytes = 16;      // unit of swizzles and of cp.async
inline constexpr int kBlockRowBytes = 128;  // of one swizzled block: all banks once
template <class Element>
inline constexpr int kBlockColumns = kBlockRowBytes / static_cast<int>(sizeof(Element));

// Rows and 16-byte chunks that the four 8x8 matrices of an ldmatrix.x4 cover.
enum class MatrixOrder {
  kRowsFirst,    // rows 0-7, 8-15, then the next chunk: A operands, and B through .trans
  kChunksFirst,  // chunk 0, 1, then the next 8 rows: B operands stored (n, k)
  kFourChunks    // chunks 0 to 3 of 8 rows: two such operands
};

// One operand's [rows, columns] tile in shared memory, as seen by one lane.
template <class Element, int kTileRows, MatrixOrder kOrder>
struct OperandTile {
  static_assert(sizeof(Element) == 2, "ldmatrix and mma.sync take 16-bit elements");

  std::uint32_t base;  // this lane's row and chunk of the first 16x16 block

  // first_chunk: even, 0 for four chunks. Columns are counted from there, in multiples of what is
  // added to it.
  __device__ __forceinline__ OperandTile(const void* smem, int first_row, int lane,
                                         int first_chunk = 0) {
    int row = lane % 16;
    int chunk = first_chunk + lane / 16;
    if (kOrder == MatrixOrder::kChunksFirst) {
      row = lane % 8 + lane / 16 * 8;
      chunk = first_chunk + lane / 8 % 2;
    } else if (kOrder == MatrixOrder::kFourChunks) {
      row = lane % 8;
      chunk = lane / 8;
    }
    base = cute::cast_smem_ptr_to_uint(smem) + (first_row + row) * kBlockRowBytes +
           ((chunk ^ (row % 8)) * kChunkBytes);
  }

  // Lane address of the 16x16 block at (row, column), both multiples of 16, row a constant.
  __device__ __forceinline__ std::uint32_t address(int row, int column) const {
    int bytes = column * static_cast<int>(sizeof(Element));
    return (base ^ (bytes % kBlockRowBytes)) + row * kBlockRowBytes +
           bytes / kBlockRowBytes * (kTileRows * kBlockRowBytes);
  }

  __device__ __forceinline__ void load(std::uint32_t (&r)[4], int row, int column) const {
    load_matrices(r, address(row, column));
  }
  __device__ __forceinline__ void load_transposed(std::uint32_t (&r)[4], int row,
                                                  int column) const {
    preflash::load_transposed(r, address(row, column));
  }
};

// c (16x8) += a (16x16) * b (16x8)
template <class MmaOp, class C>
__device__ __forceinline__ void mma_16x8x16(C&& c, const std::uint32_t (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
  MmaOp::fma(c(0), c(1), c(2), c(3), a[0], a[1], a[2], a[3], b0, b1, c(0), c(1), c(2), c(3));
}

// c (16x16, two 16x8 accumulators) += a (16x16) * b (two 16x8 operands)
template <class MmaOp, class Left, class Right>
__device__ __forceinline__ void mma_16x16x16(Left&& left, Right&& right,
                                             const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[4]) {
  mma_16x8x16<MmaOp>(left, a, b[0], b[1]);
  mma_16x8x16<MmaOp>(right, a, b[2], b[3]);
}

}  // namespace preflash::sm80
