// Global -> shared by cp.async. Rows have arbitrary addresses (packed query heads, pages), so a
// thread has 16-byte columns of a few rows. Rows outside a request and columns past head_dim are
// zero-filled and never read, because 0 * NaN is NaN.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "kernels/common/row_map.cuh"
#include "kernels/sm80/forward_traits.cuh"

namespace preflash::sm80 {

// kWhole: every row and column of the tile exists. kPartial: some do not.
enum class TileFill { kWhole, kPartial };

// Elements in global memory: as wide as the tile's, or 8 bits, which OperandConversion dequantises.
enum class Stored { kAsInTile, k8Bits };

template <class Traits>
__device__ __forceinline__ Stored stored(DType dtype) {
  bool narrow = dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
  return Traits::kConverts && narrow ? Stored::k8Bits : Stored::kAsInTile;
}
template <class Element>
__device__ __forceinline__ int bytes_of(Stored stored) {
  return stored == Stored::k8Bits ? 1 : static_cast<int>(sizeof(Element));
}

// This thread's part of a [rows, head_dim] tile: rows first_row + i * kRowsPerPass, and the chunk
// at `column` of every block.
template <class Traits, class Element>
struct TileCopy {
  static constexpr int kBlockColumns = sm80::kBlockColumns<Element>;
  static constexpr int kChunkElements = kChunkBytes / sizeof(Element);

  int first_row;
  int column;

  __device__ __forceinline__ explicit TileCopy(int thread)
      : first_row(thread / Traits::kThreadsPerRow),
        column(thread % Traits::kThreadsPerRow * kChunkElements) {}

  // Byte offset of 8-bit elements within the place of their chunk. Rows alternate, so two rows have
  // no bank conflict.
  __device__ __forceinline__ int narrow_offset() const { return first_row % 2 * kChunkElements; }

  // One row of 8-bit elements; as below. A copy has 8 bytes, because rows of an odd multiple of 8
  // elements are aligned to 8 bytes only.
  template <int kTileRows, int kHeadDim>
  __device__ __forceinline__ void copy_narrow_row(const char* row, bool row_valid, int head_dim,
                                                  int pass, std::uint32_t smem) const {
    CUTE_UNROLL
    for (int block = 0; block < kHeadDim / kBlockColumns; ++block) {
      std::uint32_t target = smem + narrow_offset() + pass * Traits::kRowsPerPass * kBlockRowBytes +
                             block * kTileRows * kBlockRowBytes;
      int bytes = row_valid && block * kBlockColumns + column < head_dim ? kChunkElements : 0;
      asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(target),
                   "l"(row + block * kBlockColumns), "n"(kChunkElements), "r"(bytes));
    }
  }

  // One row: `row` points at its element `column`, `smem` is the swizzled address of
  // (first_row, column): passes and blocks are whole swizzle atoms apart, plain offsets from it.
  template <int kTileRows, int kHeadDim, TileFill kFill>
  __device__ __forceinline__ void copy_row(const char* row, bool row_valid, int head_dim, int pass,
                                           std::uint32_t smem) const {
    CUTE_UNROLL
    for (int block = 0; block < kHeadDim / kBlockColumns; ++block) {
      std::uint32_t target =
          smem + pass * Traits::kRowsPerPass * kBlockRowBytes + block * kTileRows * kBlockRowBytes;
      const char* source = row + block * kBlockRowBytes;
      if constexpr (kFill == TileFill::kWhole) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2;" ::"r"(target),
                     "l"(source), "n"(kChunkBytes));
      } else {
        // With 0 source bytes nothing is read; the address need not be mapped.
        int bytes = row_valid && block * kBlockColumns + column < head_dim ? kChunkBytes : 0;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(target),
                     "l"(source), "n"(kChunkBytes), "r"(bytes));
      }
    }
  }
};

template <class Traits>
struct KvLoader {
  using ElementKv = typename Traits::ElementKv;
  static constexpr int kTileN = Traits::kTileN;
  static constexpr int kPasses = kTileN / Traits::kRowsPerPass;
  // The first block's swizzled place is the same in K and in V.
  static constexpr int kKtoV =
      offsetof(SharedStorage<Traits>, v) - offsetof(SharedStorage<Traits>, k);

  const KernelSegment& params;
  KeyOffsets<Traits>* offsets;
  int kv_begin;
  const RowKeys* row_keys;
  int kv_len;
  int thread;
  TileCopy<Traits, ElementKv> copy;
  const char* k;  // element `column` of row 0 of this KV head
  const char* v;
  std::uint32_t smem_k;  // this thread's first chunk of stage 0; V's lie kKtoV bytes on
  KeySlot slot;          // of key `thread` of the tile after the last stored one

  __device__ __forceinline__ KvLoader(const KernelSegment& params, const RequestInfo& request,
                                      int kv_head, SharedStorage<Traits>& smem, int thread)
      : params(params),
        offsets(smem.key_offsets),
        kv_begin(request.kv_begin),
        row_keys(smem.row_keys),
        kv_len(request.kv_len),
        thread(thread),
        copy(thread) {
    k = static_cast<const char*>(params.k.data) +
        (kv_head * params.k.stride_head + copy.column) * element_bytes();
    v = static_cast<const char*>(params.v.data) +
        (kv_head * params.v.stride_head + copy.column) * element_bytes();
    smem_k =
        cast_smem_ptr_to_uint(smem.k[0] + typename Traits::LayoutK{}(copy.first_row, copy.column));
  }

  // A page-table read goes to the L2: find offsets early, store them late, fetch after the next
  // barrier.
  __device__ __forceinline__ void find_offsets(int tile) {
    if (thread >= kTileN) return;
    int key = min(tile * kTileN + thread, kv_len - 1);
    slot = find_slot(params, kv_begin, key);
  }
  __device__ __forceinline__ void store_offsets(int tile) const {
    if (thread >= kTileN) return;
    int row = thread % Traits::kRowsPerPass;
    int pass = thread / Traits::kRowsPerPass;
    offsets[tile % 2].k[row][pass] = slot_offset(params.k, slot) * element_bytes();
    offsets[tile % 2].v[row][pass] = slot_offset(params.v, slot) * element_bytes();
  }

  // kPartial: the tile may begin below the window, in pages that the caller has recycled.
  __device__ __forceinline__ void fetch_k(int tile, int stage, TileFill fill) const {
    fetch<Traits::kHeadQk>(k, offsets[tile % 2].k[copy.first_row], params.head_dim_qk, smem_k,
                           {tile, stage, fill});
  }
  __device__ __forceinline__ void fetch_v(int tile, int stage, TileFill fill) const {
    fetch<Traits::kHeadVo>(v, offsets[tile % 2].v[copy.first_row], params.head_dim_vo,
                           smem_k + kKtoV, {tile, stage, fill});
  }

 private:
  __device__ __forceinline__ int element_bytes() const {
    return bytes_of<ElementKv>(stored<Traits>(params.kv_dtype));
  }

  struct Fetch {
    int tile;
    int stage;
    TileFill fill;
  };

  template <int kHeadDim>
  __device__ __forceinline__ void fetch(const char* head, const std::int64_t* row_offsets,
                                        int head_dim, std::uint32_t smem, Fetch what) const {
    int tile = what.tile;
    // Loads all rows first: one latency for all.
    std::int64_t rows[kPasses];
    load_row_offsets(row_offsets, rows);
    smem += what.stage * (kTileN * kHeadDim * static_cast<int>(sizeof(ElementKv)));
    if (stored<Traits>(params.kv_dtype) == Stored::k8Bits) {
      fetch_narrow_rows<kHeadDim>(head, rows, head_dim, smem, tile);
      return;
    }
    bool whole = what.fill == TileFill::kWhole && (tile + 1) * kTileN <= kv_len;
    if (whole && head_dim == kHeadDim) {
      fetch_rows<kHeadDim, TileFill::kWhole>(head, rows, head_dim, smem, tile);
    } else {
      fetch_rows<kHeadDim, TileFill::kPartial>(head, rows, head_dim, smem, tile);
    }
  }

  __device__ __forceinline__ static void load_row_offsets(const std::int64_t* source,
                                                          std::int64_t (&rows)[kPasses]) {
    if constexpr (kPasses % 2 == 0) {
      CUTE_UNROLL
      for (int i = 0; i < kPasses; i += 2) {
        asm volatile("ld.shared.v2.b64 {%0, %1}, [%2];"
                     : "=l"(rows[i]), "=l"(rows[i + 1])
                     : "r"(cast_smem_ptr_to_uint(source + i)));
      }
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kPasses; ++i) rows[i] = source[i];
    }
  }

  template <int kHeadDim>
  __device__ __forceinline__ void fetch_narrow_rows(const char* head,
                                                    const std::int64_t (&rows)[kPasses],
                                                    int head_dim, std::uint32_t smem,
                                                    int tile) const {
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int key = tile * kTileN + copy.first_row + pass * Traits::kRowsPerPass;
      bool exists = key >= row_keys[0].first && key < kv_len;
      copy.template copy_narrow_row<kTileN, kHeadDim>(head + rows[pass], exists, head_dim, pass,
                                                      smem);
    }
  }

  template <int kHeadDim, TileFill kFill>
  __device__ __forceinline__ void fetch_rows(const char* head, const std::int64_t (&rows)[kPasses],
                                             int head_dim, std::uint32_t smem, int tile) const {
    // The first row of the query tile has the lowest window.
    int first_key = kFill == TileFill::kPartial ? row_keys[0].first : 0;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      int key = tile * kTileN + copy.first_row + pass * Traits::kRowsPerPass;
      copy.template copy_row<kTileN, kHeadDim, kFill>(
          head + rows[pass], key >= first_key && key < kv_len, head_dim, pass, smem);
    }
  }
};

struct Heads {
  int qo;
  int kv;
};

// The factor of a row's logits: the scales of fp8 operands, if any.
__device__ __forceinline__ float head_factor(const KernelSegment& params, Heads heads,
                                             bool exists) {
  const float* of_q = params.extras.scale_q;
  const float* of_k = params.extras.scale_k;
  if (!exists) return 1.0f;
  return (of_q == nullptr ? 1.0f : of_q[heads.qo]) * (of_k == nullptr ? 1.0f : of_k[heads.kv]);
}

// Q of one tile; also notes what the masked tiles and the logits need to know of each row.
template <class Traits>
__device__ __forceinline__ void fetch_q(const KernelSegment& params, const RequestInfo& request,
                                        const WorkItem& item, const MaskBounds& bounds,
                                        SharedStorage<Traits>& smem, int thread) {
  using ElementQ = typename Traits::ElementQ;
  TileCopy<Traits, ElementQ> copy(thread);
  std::uint32_t target =
      cast_smem_ptr_to_uint(smem.q + typename Traits::LayoutQ{}(copy.first_row, copy.column));
  const Stored stored = sm80::stored<Traits>(params.q_dtype);
  std::int64_t first = request.qo_begin * params.q.stride_token +
                       item.kv_head * params.group_size * params.q.stride_head + copy.column;
  int num_rows = request.qo_len * params.group_size;
  CUTE_UNROLL
  for (int pass = 0; pass < Traits::kTileM / Traits::kRowsPerPass; ++pass) {
    int row = item.row_begin + copy.first_row + pass * Traits::kRowsPerPass;
    PackedRow packed = unpack_row(params, row);
    const char* source =
        static_cast<const char*>(params.q.data) + (first + packed.token * params.q.stride_token +
                                                   packed.head_in_group * params.q.stride_head) *
                                                      bytes_of<ElementQ>(stored);
    if (stored == Stored::k8Bits) {
      copy.template copy_narrow_row<Traits::kTileM, Traits::kHeadQk>(
          source, row < num_rows, params.head_dim_qk, pass, target);
    } else {
      copy.template copy_row<Traits::kTileM, Traits::kHeadQk, TileFill::kPartial>(
          source, row < num_rows, params.head_dim_qk, pass, target);
    }
  }
  for (int r = thread; r < Traits::kTileM; r += Traits::kThreads) {
    int row = item.row_begin + r;
    PackedRow packed = unpack_row(params, row);
    int token = packed.token;
    smem.row_keys[r] =
        row < num_rows ? RowKeys{bounds.first_key(token), bounds.end_key(token)} : RowKeys{0, 0};
    int head = item.kv_head * params.group_size + packed.head_in_group;
    bool last = row == min(item.row_begin + Traits::kTileM, num_rows) - 1;
    ScoreBias<Traits>::note_row(smem.bias_rows, {r, token, head, last}, params, bounds);
    if constexpr (Traits::kConverts) {
      smem.conversion.row_factor[r] = head_factor(params, {head, item.kv_head}, row < num_rows);
    }
  }
}

}  // namespace preflash::sm80
