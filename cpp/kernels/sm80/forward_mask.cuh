// The place of each score in a thread's fragment, and the policies that depend on it: masks here,
// biases in score_bias.cuh.
#pragma once

#include "kernels/common/mask.cuh"
#include "kernels/common/row_map.cuh"
#include "kernels/sm80/forward_traits.cuh"

namespace preflash::sm80 {

// ((2, 2), MMA_M, MMA_N) accumulator -> (rows of this thread, columns of this thread)
template <class L>
__device__ constexpr auto as_rows_and_columns(L layout) {
  auto split = logical_divide(layout, Shape<_2>{});  // ((2, 2), MMA_M, MMA_N)
  return make_layout(make_layout(get<0, 1>(split), get<1>(split)),
                     make_layout(get<0, 0>(split), get<2>(split)));
}

// (rows, columns) of this thread -> (tile row, tile column) of an accumulator kColumns wide:
// constants but for the thread's own part.
template <class Traits, int kColumns>
__device__ __forceinline__ auto accumulator_places(int thread) {
  Tensor tile = make_identity_tensor(Shape<Int<Traits::kTileM>, Int<kColumns>>{});
  using Mma =
      std::conditional_t<kColumns == Traits::kTileN, typename Traits::MmaS, typename Traits::Mma>;
  Tensor mine = Mma{}.get_slice(thread).partition_C(tile);  // ((2, 2), M, N)
  return make_tensor(mine.data(), as_rows_and_columns(mine.layout()));
}

// Token and query head of a row.
struct Query {
  int token;
  int head;
};

// Coordinates of row r of this thread's accumulators.
template <class Traits>
struct RowCoordinates {
  using Places = decltype(accumulator_places<Traits, Traits::kTileN>(0));

  const KernelSegment& params;
  const RequestInfo& request;
  const WorkItem& item;
  Places places;

  __device__ __forceinline__ RowCoordinates(const KernelSegment& params, const RequestInfo& request,
                                            const WorkItem& item, int thread)
      : params(params),
        request(request),
        item(item),
        places(accumulator_places<Traits, Traits::kTileN>(thread)) {}

  __device__ __forceinline__ int tile_row(int r) const { return get<0>(places(r, 0)); }
  __device__ __forceinline__ int row(int r) const { return item.row_begin + tile_row(r); }
  __device__ __forceinline__ bool exists(int r) const {
    return row(r) < request.qo_len * params.group_size;
  }
  // Past the request's end the token does not exist, but the head does.
  __device__ __forceinline__ Query query(int r) const {
    PackedRow packed = unpack_row(params, row(r));
    return {packed.token, item.kv_head * params.group_size + packed.head_in_group};
  }
};

// Coordinates of element (r, c) of this thread's (rows, columns) scores of one tile.
template <class Traits>
struct ScoreCoordinates : RowCoordinates<Traits> {
  int first_key;  // of the tile

  __device__ __forceinline__ ScoreCoordinates(const RowCoordinates<Traits>& rows, int tile)
      : RowCoordinates<Traits>(rows), first_key(tile * Traits::kTileN) {}

  __device__ __forceinline__ int tile_column(int c) const { return get<1>(this->places(0, c)); }
  __device__ __forceinline__ int key(int c) const { return first_key + tile_column(c); }
};

// A mask is a policy: apply() makes -inf of the scores, (rows, columns) of this thread, that it
// does not keep. `row_keys` are the intervals that the bounds leave of the tile's rows.

// Length, causal and window: an interval of keys.
template <class Traits>
struct BoundsMask {
  template <class Scores>
  __device__ static __forceinline__ void apply(Scores& scores, const ScoreCoordinates<Traits>& at,
                                               const RowKeys* row_keys) {
    CUTE_UNROLL
    for (int r = 0; r < size<0>(scores); ++r) {
      RowKeys keys = row_keys[at.tile_row(r)];
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        int key = at.key(c);
        if (key < keys.first || key >= keys.end) scores(r, c) = -INFINITY;
      }
    }
  }
};

// A bit for each key within the bounds. The four lanes that share rows share their words, too: each
// makes a part of them, all rows of the first word, then those of the next.
template <class Traits>
struct CustomMask {
  static constexpr int kWordColumns = 32;
  // A thread's columns lie in groups of 8, two in each: four groups share one word, or two where
  // warps share rows.
  static constexpr int kElementsPerWord = kWordColumns / 8 * 2 / Traits::kColumnWarps;
  static constexpr int kRows = Traits::kRowsPerThread;
  static constexpr int kWords = ceil_div(Traits::kTileN, kWordColumns) * kRows;

  template <class Scores>
  __device__ static __forceinline__ void apply(Scores& scores, const ScoreCoordinates<Traits>& at,
                                               const RowKeys* row_keys, int lane) {
    std::uint32_t own[ceil_div(kWords, 4)];
    CUTE_UNROLL
    for (int i = 0; i < ceil_div(kWords, 4); ++i) {
      int word = i * 4 + lane % 4;
      own[i] = make_word(at, row_keys, word % kRows, word / kRows * kWordColumns);
    }
    CUTE_UNROLL
    for (int word = 0; word < kWords; ++word) {
      std::uint32_t bits = __shfl_sync(0xffffffffu, own[word / 4], word % 4, 4);
      bits >>= at.tile_column(0);
      int begin = word / kRows * kElementsPerWord;
      CUTE_UNROLL
      for (int c = begin; c < min(begin + kElementsPerWord, int{size<1>(scores)}); ++c) {
        int bit = at.tile_column(c) - at.tile_column(0) - word / kRows * kWordColumns;
        if (!((bits >> bit) & 1u)) scores(word % kRows, c) = -INFINITY;
      }
    }
  }

 private:
  // Row r, from a column of the tile on.
  __device__ static __forceinline__ std::uint32_t make_word(const ScoreCoordinates<Traits>& at,
                                                            const RowKeys* row_keys, int r,
                                                            int column) {
    RowKeys keys = row_keys[at.tile_row(r)];
    int key = at.first_key + column;
    int skipped = max(keys.first - key, 0);
    int end = min(keys.end - key, kWordColumns);
    // A word that begins past the row's end may begin past the buffer's.
    if (skipped >= end) return 0u;
    std::uint32_t kept = ~0u >> (kWordColumns - end) & ~0u << skipped;
    if (mask_of<Traits>(at.params) != Mask::kCustom) return kept;
    std::int64_t bit = static_cast<std::int64_t>(at.query(r).token) * at.request.kv_len + key;
    return kept & load_mask_word(at.params.extras.mask_bits + at.request.mask_begin, bit);
  }
};

// Makes -inf of what the variant's masks take out. `scores`: (rows, columns) of this thread.
template <class Traits, class Scores>
__device__ __forceinline__ void mask_tile(Scores& scores, const ScoreCoordinates<Traits>& at,
                                          const SharedStorage<Traits>& smem, int lane) {
  if constexpr (Traits::kVariant.mask == Mask::kCustom) {
    CustomMask<Traits>::apply(scores, at, smem.row_keys, lane);
  } else {
    BoundsMask<Traits>::apply(scores, at, smem.row_keys);
  }
}

}  // namespace preflash::sm80
