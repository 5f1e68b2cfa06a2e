// Scores know where they are: what each element of a thread's score fragment is the score of, and
// the policies that go by it: masks, and in score_bias.cuh biases.
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
  Tensor mine = typename Traits::Mma{}.get_slice(thread).partition_C(tile);  // ((2, 2), M, N)
  return make_tensor(mine.data(), as_rows_and_columns(mine.layout()));
}

// What a row is the row of.
struct Query {
  int token;
  int head;
};

// Of row r of this thread's accumulators.
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

// Of element (r, c) of this thread's scores of one tile, as rows and columns.
template <class Traits>
struct ScoreCoordinates : RowCoordinates<Traits> {
  int first_key;  // of the tile

  __device__ __forceinline__ ScoreCoordinates(const RowCoordinates<Traits>& rows, int tile)
      : RowCoordinates<Traits>(rows), first_key(tile * Traits::kTileN) {}

  __device__ __forceinline__ int tile_column(int c) const { return get<1>(this->places(0, c)); }
  __device__ __forceinline__ int key(int c) const { return first_key + tile_column(c); }
};

// A mask is a policy: apply() makes -inf of what row r does not keep. `scores` are the row's
// columns, `keys` the interval that the bounds leave of it.

// Length, causal and window: an interval of keys.
template <class Traits>
struct BoundsMask {
  template <class Scores>
  __device__ static __forceinline__ void apply(Scores&& scores, const ScoreCoordinates<Traits>& at,
                                               RowKeys keys) {
    CUTE_UNROLL
    for (int c = 0; c < size(scores); ++c) {
      int key = at.key(c);
      if (key < keys.first || key >= keys.end) scores(c) = -INFINITY;
    }
  }
};

// A bit for each key. What lies past the interval's end is left to the bounds.
template <class Traits>
struct CustomMask {
  static constexpr int kColumnsPerWord = 32;
  // A thread's columns lie in groups of 8, two in each: four groups share one word, or two where
  // warps share rows.
  static constexpr int kElementsPerWord = kColumnsPerWord / 8 * 2 / Traits::kColumnWarps;

  template <class Scores>
  __device__ static __forceinline__ void apply(Scores&& scores, const ScoreCoordinates<Traits>& at,
                                               int r, RowKeys keys) {
    const std::uint8_t* bits = at.params.extras.mask_bits + at.request.mask_begin;
    std::int64_t row_bit =
        static_cast<std::int64_t>(at.query(r).token) * at.request.kv_len + at.first_key;
    int num_bits = keys.end - at.first_key;  // from the tile's first column on: 0 or less, none
    std::uint32_t word = 0;
    CUTE_UNROLL
    for (int c = 0; c < size(scores); ++c) {
      int word_column = c / kElementsPerWord * kColumnsPerWord;
      if (c % kElementsPerWord == 0) {
        // A word that begins past the row's end may begin past the buffer's.
        word = word_column < num_bits ? load_mask_word(bits, row_bit + word_column) : 0u;
      }
      if (!((word >> (at.tile_column(c) - word_column)) & 1u)) scores(c) = -INFINITY;
    }
  }
};

// Makes -inf of what the variant's masks take out. `scores`: (rows, columns) of this thread.
template <class Traits, class Scores>
__device__ __forceinline__ void mask_tile(Scores& scores, const ScoreCoordinates<Traits>& at,
                                          const SharedStorage<Traits>& smem) {
  CUTE_UNROLL
  for (int r = 0; r < size<0>(scores); ++r) {
    RowKeys keys = smem.row_keys[at.tile_row(r)];
    if (mask_of<Traits>(at.params) == Mask::kCustom) {
      CustomMask<Traits>::apply(scores(r, _), at, r, keys);
    }
    BoundsMask<Traits>::apply(scores(r, _), at, keys);
  }
}

}  // namespace preflash::sm80
