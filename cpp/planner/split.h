// Split-KV: cuts KV only where the machine would idle otherwise.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "planner/work.h"

namespace preflash {

inline constexpr std::int32_t kMaxChunks = 32767;  // chunk numbers and their counts are int16
inline constexpr std::int32_t kUnsplit = 1 << 30;  // a chunk length in tiles that none exceeds
// The planner chooses no shorter chunks.
inline constexpr std::int32_t kMinAutoChunkKeys = 64;
// Chunks of fewer keys are short. They pay where all items run at once, each with the bandwidth of
// a CTA, and few partial rows are merged: in a decode step of a few requests
// (measured: docs/dev/experiments/decode-and-split.md).
inline constexpr std::int32_t kShortChunkKeys = 256;
inline constexpr std::int64_t kMostRowsOfShortChunks = 4096;

// Limits on the split of one segment.
struct SegmentLimits {
  std::int64_t rows = 0;  // of partial results; fits int32
  std::int64_t merges = 0;
};

// Limits on the splits of all segments together.
struct SplitLimits {
  PerSegment<SegmentLimits> segments = {};
  std::int64_t items = 0;
  std::int64_t float_bytes = 0;  // for the partial rows of all segments
  std::int64_t copy_bytes = 0;   // Problem::copy_bytes
};

struct SegmentEstimate {
  std::int64_t num_items = 0;
  std::int64_t num_merges = 0;
  std::int64_t num_partial_rows = 0;
  std::int32_t num_chunks = 0;  // highest chunk number plus one
};

struct SplitEstimate {
  PerSegment<SegmentEstimate> segments;
  std::int64_t makespan = 0;
  std::int64_t full_makespan = 0;  // over full_slots, without merges
  std::int64_t total_cost = 0;
  std::int64_t num_items = 0;
  std::int64_t float_bytes = 0;
};

// Float workspace of so many partial rows.
std::int64_t partial_bytes(std::int64_t rows, std::int32_t head_dim_vo);

// Counts items per cost and bounds the time of the busiest of `cta_slots` slots from below.
class CostHistogram {
 public:
  explicit CostHistogram(std::int32_t longest);

  void add(std::int32_t cost, std::int64_t times) {
    counts_[cost >> shift_] += times;
    total_ += cost * times;
    if (cost > longest_) longest_ = cost;
  }
  // The largest of: the longest item; the sum over slots; and for every cost v, ceil(n / slots) * v
  // where n items cost at least v (that many share a slot). List scheduling longest-first comes
  // close to it.
  std::int64_t makespan(std::int64_t cta_slots) const;
  std::int64_t total() const { return total_; }

 private:
  std::int32_t shift_ = 0;
  std::int32_t longest_ = 0;
  std::int64_t total_ = 0;
  std::vector<std::int64_t> counts_;
};

struct SplitSegment {
  std::span<const QueryTile> tiles;
  std::int32_t longest = 0;  // the most KV tiles that one of them touches
  std::int64_t num_kv_heads = 1;
  std::int32_t head_dim_vo = 0;
  std::int32_t tile_n = 64;
  std::int32_t asked_chunk = 0;  // KV tiles per chunk, or kUnsplit, as the caller asks; 0: any

  std::int32_t chunk_tiles(std::int32_t chosen) const {
    return asked_chunk > 0 ? asked_chunk : chosen;
  }
  // Rows of partial results of all KV heads for one tile. More than kMaxChunks chunks are refused
  // later; counting their rows might overflow.
  std::int64_t partial_rows(const QueryTile& tile, std::int32_t chunk_tiles) const {
    const std::int64_t chunks = std::min(chunks_of(tile, chunk_tiles).count(), kMaxChunks);
    return chunks > 1 ? chunks * tile.rows * num_kv_heads : 0;
  }
};

struct SplitProblem {
  PerSegment<SplitSegment> segments = {};
  std::int64_t cta_slots = 1;
  std::int64_t full_slots = 1;  // with so many CTAs, evenly loaded, the machine has enough to do
  SplitLimits limits;
};

// Estimates a split into chunks of chunk_tiles KV tiles; a segment's asked_chunk takes precedence.
SplitEstimate estimate(const SplitProblem& split, std::int32_t chunk_tiles);

// KV tiles per chunk, or kUnsplit: one length for every segment whose caller leaves it open, since
// one machine has to be filled.
std::int32_t choose_chunk_tiles(const SplitProblem& split);

}  // namespace preflash
