// Swizzled layout of a tile of 16-bit elements in shared memory: blocks of 128 bytes of columns,
// each with all rows of the tile, whose pieces of 16 bytes are permuted by the row.
#pragma once

namespace preflash {

// The byte of an element in a tile of kRows rows.
// Unsigned, because the remainder of a signed number takes three instructions.
template <unsigned kRows>
__device__ __forceinline__ unsigned swizzled(unsigned row, unsigned column) {
  unsigned piece = (column % 64 / 8) ^ (row % 8);
  return (column / 64 * kRows + row) * 128 + piece * 16 + column % 8 * 2;
}

// A column of such a tile, in the rows first_row + offset. The swizzle of a row follows from
// that of the first one where no bit below 8 is set in both first_row and an offset.
template <unsigned kRows>
struct SwizzledColumn {
  unsigned char* block;  // from first_row on
  unsigned in_row;       // of first_row

  __device__ __forceinline__ SwizzledColumn(unsigned char* tile, unsigned first_row,
                                            unsigned column)
      : block(tile + (column / 64 * kRows + first_row) * 128),
        in_row(column % 64 * 2 ^ first_row % 8 * 16) {}
  __device__ __forceinline__ unsigned char* at(unsigned offset) const {
    return block + offset * 128 + (in_row ^ offset % 8 * 16);
  }
};

}  // namespace preflash
