// Global -> shared by cp.async. Rows have arbitrary addresses (packed query heads, pages), so a
// thread owns whole 16-byte columns of a few rows; what lies outside a request or past head_dim is
// zero-filled and never read: a stranger's NaN must not meet a zero probability.
#pragma once

#include <cute/arch/copy_sm80.hpp>

#include "kernels/common/row_map.cuh"
#include "kernels/sm80/forward_traits.cuh"
#include "preflash/alibi.h"

namespace preflash::sm80 {

// kWhole: every row and column of the tile exists. kPartial: some do not.
enum class TileFill { kWhole, kPartial };

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
        // NOTE: with 0 source bytes nothing is read; the address need not be mapped.
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
        (kv_head * params.k.stride_head + copy.column) * sizeof(ElementKv);
    v = static_cast<const char*>(params.v.data) +
        (kv_head * params.v.stride_head + copy.column) * sizeof(ElementKv);
    smem_k =
        cast_smem_ptr_to_uint(smem.k[0] + typename Traits::LayoutK{}(copy.first_row, copy.column));
  }

  // A page-table read takes a trip to L2: find early, store late, fetch behind the next barrier.
  __device__ __forceinline__ void find_offsets(int tile) {
    if (thread >= kTileN) return;
    int key = min(tile * kTileN + thread, kv_len - 1);
    slot = find_slot(params, kv_begin, key);
  }
  __device__ __forceinline__ void store_offsets(int tile) const {
    if (thread >= kTileN) return;
    int row = thread % Traits::kRowsPerPass;
    int pass = thread / Traits::kRowsPerPass;
    offsets[tile % 2].k[row][pass] = slot_offset(params.k, slot) * sizeof(ElementKv);
    offsets[tile % 2].v[row][pass] = slot_offset(params.v, slot) * sizeof(ElementKv);
  }

  // kPartial: the tile may begin below the window, with keys that the caller has long recycled.
  __device__ __forceinline__ void fetch_k(int tile, int stage, TileFill fill) const {
    fetch<Traits::kHeadQk>(k, offsets[tile % 2].k[copy.first_row], params.head_dim_qk, smem_k,
                           {tile, stage, fill});
  }
  __device__ __forceinline__ void fetch_v(int tile, int stage, TileFill fill) const {
    fetch<Traits::kHeadVo>(v, offsets[tile % 2].v[copy.first_row], params.head_dim_vo,
                           smem_k + kKtoV, {tile, stage, fill});
  }

 private:
  struct Fetch {
    int tile;
    int stage;
    TileFill fill;
  };

  template <int kHeadDim>
  __device__ __forceinline__ void fetch(const char* head, const std::int64_t* row_offsets,
                                        int head_dim, std::uint32_t smem, Fetch what) const {
    int tile = what.tile;
    // All of them first: one latency, not one per row.
    std::int64_t rows[kPasses];
    load_row_offsets(row_offsets, rows);
    smem += what.stage * (kTileN * kHeadDim * static_cast<int>(sizeof(ElementKv)));
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

// Q of one tile; also notes which keys each row keeps, for the masked tiles, and its slope.
template <class Traits>
__device__ __forceinline__ void fetch_q(const KernelSegment& params, const RequestInfo& request,
                                        const WorkItem& item, const MaskBounds& bounds,
                                        SharedStorage<Traits>& smem, int thread) {
  using ElementQ = typename Traits::ElementQ;
  TileCopy<Traits, ElementQ> copy(thread);
  std::uint32_t target =
      cast_smem_ptr_to_uint(smem.q + typename Traits::LayoutQ{}(copy.first_row, copy.column));
  const ElementQ* q = static_cast<const ElementQ*>(params.q.data) +
                      request.qo_begin * params.q.stride_token +
                      item.kv_head * params.group_size * params.q.stride_head + copy.column;
  int num_rows = request.qo_len * params.group_size;
  CUTE_UNROLL
  for (int pass = 0; pass < Traits::kTileM / Traits::kRowsPerPass; ++pass) {
    int row = item.row_begin + copy.first_row + pass * Traits::kRowsPerPass;
    PackedRow packed = unpack_row(params, row);
    const ElementQ* source =
        q + packed.token * params.q.stride_token + packed.head_in_group * params.q.stride_head;
    copy.template copy_row<Traits::kTileM, Traits::kHeadQk, TileFill::kPartial>(
        reinterpret_cast<const char*>(source), row < num_rows, params.head_dim_qk, pass, target);
  }
  for (int r = thread; r < Traits::kTileM; r += Traits::kThreads) {
    int row = item.row_begin + r;
    PackedRow packed = unpack_row(params, row);
    int token = packed.token;
    smem.row_keys[r] =
        row < num_rows ? RowKeys{bounds.first_key(token), bounds.end_key(token)} : RowKeys{0, 0};
    if constexpr (Traits::kVariant.position == Position::kAlibi) {
      int head = item.kv_head * params.group_size + packed.head_in_group;
      smem.row_slopes.slope[r] =
          alibi_slope(head, params.num_qo_heads) * (kLog2E / params.logits.scale_log2);
      // The last row keeps the last key, whichever chunk of the keys this item has.
      bool last = row == min(item.row_begin + Traits::kTileM, num_rows) - 1;
      if (last) smem.row_slopes.key_origin = bounds.end_key(token) - 1;
    }
  }
}

// What happens to Q where it lies, between its arrival and the first product. Each thread changes
// the chunks that it has copied itself, so its own wait is enough before and the next barrier
// after.
template <class Traits>
struct QPrologue {
  using ElementQ = typename Traits::ElementQ;

  const KernelSegment& params;
  SharedStorage<Traits>& smem;
  int thread;

  // Rare: sm_scale <= 0.
  __device__ __forceinline__ bool wanted() const { return params.logits.q_factor != 1.0f; }

  __device__ __forceinline__ void run() const { scale(params.logits.q_factor); }

 private:
  __device__ __forceinline__ void scale(float factor) const {
    TileCopy<Traits, ElementQ> copy(thread);
    ElementQ* own = smem.q + typename Traits::LayoutQ{}(copy.first_row, copy.column);
#pragma unroll 1
    for (int pass = 0; pass < Traits::kTileM / Traits::kRowsPerPass; ++pass) {
#pragma unroll 1
      for (int block = 0; block < Traits::kHeadQk / copy.kBlockColumns; ++block) {
        ElementQ* chunk =
            own + (pass * Traits::kRowsPerPass + block * Traits::kTileM) * copy.kBlockColumns;
#pragma unroll 1
        for (int i = 0; i < copy.kChunkElements; ++i) {
          chunk[i] = static_cast<ElementQ>(static_cast<float>(chunk[i]) * factor);
        }
      }
    }
  }
};

}  // namespace preflash::sm80
