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

inline constexpr int kChunkBytes = 16;      // what a swizzle moves and a cp.async copies
inline constexpr int kBlockRowBytes = 128;  // of one swizzled block: all banks once
template <class Element>
inline constexpr int kBlockColumns = kBlockRowBytes / static_cast<int>(sizeof(Element));

// Which rows and 16-byte chunks the four 8x8 matrices of an ldmatrix.x4 cover.
enum class MatrixOrder {
  kRowsFirst,   // rows 0-7, 8-15, then the next chunk: A operands, and B through .trans
  kChunksFirst  // chunk 0, 1, then the next 8 rows: B operands stored (n, k)
};

// One operand's [rows, columns] tile in shared memory, as seen by one lane.
template <class Element, int kTileRows, MatrixOrder kOrder>
struct OperandTile {
  static_assert(sizeof(Element) == 2, "ldmatrix and mma.sync take 16-bit elements");

  std::uint32_t base;  // this lane's row and chunk of the first 16x16 block

  // first_chunk: even. Columns are counted from there, in multiples of what is added to it.
  __device__ __forceinline__ OperandTile(const void* smem, int first_row, int lane,
                                         int first_chunk = 0) {
    int row = kOrder == MatrixOrder::kRowsFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    int chunk = first_chunk + (kOrder == MatrixOrder::kRowsFirst ? lane / 16 : lane / 8 % 2);
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

// c (16x16, two 16x8 accumulators) += a (16x16) * b (two 16x8 operands)
template <class MmaOp, class Left, class Right>
__device__ __forceinline__ void mma_16x16x16(Left&& left, Right&& right,
                                             const std::uint32_t (&a)[4],
                                             const std::uint32_t (&b)[4]) {
  MmaOp::fma(left(0), left(1), left(2), left(3), a[0], a[1], a[2], a[3], b[0], b[1], left(0),
             left(1), left(2), left(3));
  MmaOp::fma(right(0), right(1), right(2), right(3), a[0], a[1], a[2], a[3], b[2], b[3], right(0),
             right(1), right(2), right(3));
}

}  // namespace preflash::sm80
