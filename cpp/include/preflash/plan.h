// Output of the planner, which everything downstream reads: the work list and its index, laid out
// in one int workspace (uploaded to the GPU as one copy) and one float workspace (split-KV
// partials).
#pragma once

#include <cstddef>
#include <cstdint>

#include "preflash/mask_range.h"
#include "preflash/options.h"
#include "preflash/per_segment.h"

namespace preflash {

// One request of the batch, in tokens. 32 bytes: two 128-bit loads.
struct alignas(16) RequestInfo {
  std::int32_t qo_begin = 0;  // first row of q and o
  std::int32_t qo_len = 0;
  std::int32_t kv_begin = 0;  // ragged: first row of k and v; paged: first entry in page_indices
  std::int32_t kv_len = 0;
  std::int64_t mask_begin = 0;  // first byte of its bits in the packed custom mask
  // KV chunk c holds keys [c, c + 1) * chunk_keys from ChunkOrigin on; a multiple of tile n.
  std::int32_t chunk_keys = 0;
  std::int32_t segment = 0;  // to which the request belongs, and its items and merges with it
};
static_assert(sizeof(RequestInfo) == 32);

// Returns the request with `now` keys, at most those that were planned.
PREFLASH_HD constexpr RequestInfo with_keys(RequestInfo request, std::int32_t now) {
  if (now < request.kv_len) request.kv_len = now > 0 ? now : 0;
  return request;
}

// Returns the bounds of the keys that the rows of a request keep, without its custom mask.
PREFLASH_HD constexpr MaskBounds bounds_of(const AttentionOptions& options,
                                           const RequestInfo& request) {
  return {.qo_len = request.qo_len,
          .kv_len = request.kv_len,
          .window_left = options.window_left,
          .causal = options.causal,
          .chunk_size = options.chunk_size};
}

// Packed rows of one query tile, of the tile_m that the kernel computes: tile t of a request begins
// at row t * rows_per_tile. Tiles of a token-aligned family begin at a token's first head; a
// group that is larger than the tile is cut anywhere.
PREFLASH_HD constexpr int rows_per_tile(TileRows tile_rows, int tile_m, int group_size) {
  bool token_aligned = tile_rows == TileRows::kTokenAligned && group_size <= tile_m;
  return token_aligned ? tile_m - tile_m % group_size : tile_m;
}

// The rows of a query tile: those of the request, and the whole tile, which may begin before the
// request and end after it.
struct QueryRows {
  int begin = 0;
  int count = 0;  // 0 or less: none
  int tile_begin = 0;
  int tile_end = 0;

  // Tokens of the rows of the request, from that of the whole tile's first row on.
  PREFLASH_HD constexpr RowSpan tokens(int group_size) const {
    const int first = tile_begin / group_size - (tile_begin % group_size < 0 ? 1 : 0);
    return {first, (begin + count - 1) / group_size};
  }
};

// Cuts the packed rows of a request into query tiles. Aligned tiles begin at multiples of
// rows_per_tile from the row whose position is 0, wherever the request's first row is: which rows
// share a tile depends on their positions alone (ForwardKernel::aligns_query_tiles).
struct QueryGrid {
  int rows_per_tile = 1;
  int group_size = 1;
  bool aligned = false;

  // Rows of the first tile before the request's first row.
  PREFLASH_HD constexpr int rows_before(const RequestInfo& request) const {
    if (!aligned) return 0;
    const int rest = (request.kv_len - request.qo_len) % rows_per_tile * group_size % rows_per_tile;
    return rest < 0 ? rest + rows_per_tile : rest;
  }
  // row_begin: of the tile, a multiple of rows_per_tile.
  PREFLASH_HD constexpr QueryRows rows(const RequestInfo& request, int row_begin) const {
    const int all = request.qo_len * group_size;
    const int first = row_begin - rows_before(request);
    const int end = first + rows_per_tile;
    const int begin = aligned && first < 0 ? 0 : first;
    return {begin, (end < all ? end : all) - begin, first, end};
  }
  // Partial rows that a tile has of each chunk. Those of aligned tiles are as many for every
  // length that the device may find.
  PREFLASH_HD constexpr int partial_rows(const RequestInfo& request, const QueryRows& rows) const {
    if (!aligned) return rows.count;
    const int all = request.qo_len * group_size;
    return all < rows_per_tile ? all : rows_per_tile;
  }
};

// One tile of packed rows of one KV head against one KV chunk. Packed row r of a request is token
// r / group_size, query head kv_head * group_size + r % group_size. 16 bytes: one 128-bit load.
struct alignas(16) WorkItem {
  std::int32_t request = 0;
  std::int32_t row_begin = 0;  // of the tile (QueryGrid); a multiple of rows_per_tile()
  std::int16_t kv_head = 0;
  std::int16_t chunk = 0;
  std::int32_t partial_row = kFinal;  // kFinal, or the first of the partial rows that it fills

  static constexpr std::int32_t kFinal = -1;
};
static_assert(sizeof(WorkItem) == 16);

// The origin of a request's chunks: key 0, or the window of its first row
// (AttentionOptions::chunks_begin_at_window()), down to a whole tile. That may be before key 0.
struct ChunkOrigin {
  int reach = 0;      // AttentionOptions::reach()
  int alignment = 0;  // tile n; 0: key 0

  PREFLASH_HD constexpr int of(const RequestInfo& request) const {
    if (alignment == 0) return 0;
    const int first = request.kv_len - request.qo_len - reach;
    const int rest = first % alignment;
    return first - (rest < 0 ? rest + alignment : rest);
  }
};

// chunk_keys from here on: the request is not split.
inline constexpr std::int32_t kWholeRequest = 1 << 30;

// The keys of an item's chunk. A product of chunk and chunk_keys past the request's end might
// overflow int32.
PREFLASH_HD constexpr KeySpan chunk_of(const WorkItem& item, const RequestInfo& request,
                                       const ChunkOrigin& origin) {
  if (request.chunk_keys >= kWholeRequest) return {0, request.kv_len};
  KeySpan chunk{origin.of(request) + item.chunk * request.chunk_keys, request.kv_len};
  if (request.kv_len - chunk.begin > request.chunk_keys) {
    chunk.end = chunk.begin + request.chunk_keys;
  }
  return chunk;
}

// One tile whose KV was split. Its rows have partials for every chunk, in chunk order: those of
// chunk i begin at first_row + i * QueryGrid::partial_rows().
// The combine kernel turns them into the tile's rows of o and lse.
struct alignas(16) MergeItem {
  std::int32_t request = 0;
  std::int32_t row_begin = 0;
  std::int16_t kv_head = 0;
  std::int16_t num_chunks = 0;
  std::int32_t first_row = 0;
};
static_assert(sizeof(MergeItem) == 16);

// The base-2 log-sum-exp of a row's share of the keys, high + low. Two floats: weights are taken
// from differences, and one float of an LSE near 2^24 has no bits left for them. No key: 0 and
// -inf.
struct alignas(8) PartialLse {
  float high = 0.0f;
  float low = 0.0f;
};

// A typed place in a workspace. Offsets are bytes from its base and multiples of 16.
template <class T>
struct Offset {
  std::int64_t bytes = -1;  // -1: absent

  bool present() const { return bytes >= 0; }
  T* in(void* base) const {
    return present() ? reinterpret_cast<T*>(static_cast<std::byte*>(base) + bytes) : nullptr;
  }

  friend bool operator==(const Offset&, const Offset&) = default;
};

// Parts of the workspaces that only one segment's items use. Each segment numbers its partial rows
// from 0.
struct SegmentLayout {
  Offset<MergeItem> merges;  // [num_merges]
  Offset<float> partial_o;   // [num_partial_rows, head_dim_vo], each normalised by its own sum
  Offset<PartialLse> partial_lse;  // [num_partial_rows]
  // With a custom mask, where the kernel reads its tiles (mask_tiles.h).
  Offset<std::int64_t> mask_tiles_begin;  // [requests + 1]: each request's first word
  Offset<std::uint32_t> mask_tiles;       // [num_mask_tile_words], which the device writes

  friend bool operator==(const SegmentLayout&, const SegmentLayout&) = default;
};

struct PlanLayout {
  Offset<RequestInfo> requests;  // [num_requests], segment by segment
  Offset<WorkItem> items;        // [num_items]
  // [num_ctas + 1]: CTA c, or a cluster of ctas_per_item CTAs, runs the items [cta_begin[c],
  // cta_begin[c + 1]); absent: one per item
  Offset<std::int32_t> cta_begin;
  SegmentLayout segments[kMaxSegments];
  std::int64_t int_bytes = 0;
  std::int64_t float_bytes = 0;

  friend bool operator==(const PlanLayout&, const PlanLayout&) = default;
};

struct SegmentSizes {
  int num_merges = 0;
  int num_partial_rows = 0;
  // Room: what is used, or the most that a CUDA graph may use.
  std::int64_t num_mask_tile_words = 0;
};

struct PlanSizes {
  int num_requests = 0;
  int num_items = 0;
  int num_ctas = 0;
  SegmentSizes segments[kMaxSegments];
  std::int64_t num_kv_tiles = 0;       // sum over items: what the machine will do
  std::int64_t makespan_kv_tiles = 0;  // the planner's estimate for the busiest slot

  int num_merges() const {
    int merges = 0;
    for (const SegmentSizes& segment : segments) merges += segment.num_merges;
    return merges;
  }
};

}  // namespace preflash
