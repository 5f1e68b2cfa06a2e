#include "planner/split.h"

#include <algorithm>
#include <functional>

#include "planner/arena.h"

namespace preflash {
namespace {

constexpr std::int32_t kMaxBuckets = 2048;

// A machine this evenly filled is left alone, and a split has to gain this much (in tenths: small
// factors, which int64 has room for on top of the largest batch's cost).
constexpr std::int64_t kEvenTenths = 11;
constexpr std::int64_t kGainTenths = 9;

// Chunk lengths worth a look, longest first: equal parts of the longest tile, in steps of a
// quarter; and the parts that fill the slots in one to four waves.
std::vector<std::int32_t> ladder(std::int32_t longest, std::int32_t shortest_chunk,
                                 std::int64_t items_per_wave) {
  std::vector<std::int32_t> chunks;
  chunks.reserve(64);
  const std::int32_t most_parts = longest / std::max(shortest_chunk, 1);
  for (std::int32_t parts = 2; parts <= most_parts; parts += std::max(parts / 4, 1)) {
    chunks.push_back(ceil_div(longest, parts));
  }
  for (std::int64_t waves = 1; waves <= 4; ++waves) {
    const std::int64_t parts = items_per_wave * waves;
    if (parts >= 2 && parts <= most_parts) {
      chunks.push_back(ceil_div(longest, static_cast<std::int32_t>(parts)));
    }
  }
  std::sort(chunks.begin(), chunks.end(), std::greater<>());
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  return chunks;
}

bool fits(const SplitEstimate& estimate, const SplitLimits& limits) {
  for (int s = 0; s < estimate.segments.size(); ++s) {
    const SegmentEstimate& segment = estimate.segments[s];
    if (segment.num_partial_rows > limits.segments[s].rows ||
        segment.num_merges > limits.segments[s].merges || segment.num_chunks > kMaxChunks) {
      return false;
    }
  }
  return estimate.num_items <= limits.items && estimate.float_bytes <= limits.float_bytes;
}

constexpr std::int32_t kOverhead = CostModel::kItem + CostModel::kPartial;

SegmentEstimate estimate_segment(const SplitSegment& split, std::int32_t chunk_tiles,
                                 CostHistogram& costs) {
  const std::int64_t heads = split.num_kv_heads;
  SegmentEstimate result;
  for (const QueryTile& tile : split.tiles) {
    const ChunkSpan chunks = chunks_of(tile, chunk_tiles);
    const std::int32_t count = chunks.count();
    const std::int64_t times = tile.alike * heads;
    result.num_items += count * times;
    result.num_chunks = std::max(result.num_chunks, chunks.last + 1);
    if (count == 1) {
      costs.add(tile.kv_tiles() + CostModel::kItem, times);
      continue;
    }
    costs.add((chunks.first + 1) * chunk_tiles - tile.kv_begin + kOverhead, times);
    costs.add(tile.kv_end - chunks.last * chunk_tiles + kOverhead, times);
    if (count > 2) costs.add(chunk_tiles + kOverhead, (count - 2) * times);
    result.num_partial_rows += split.partial_rows(tile, chunk_tiles) * tile.alike;
    result.num_merges += times;
  }
  return result;
}

}  // namespace

std::int64_t partial_bytes(std::int64_t rows, std::int32_t head_dim_vo) {
  Arena arena;
  arena.take<float>(rows * head_dim_vo);
  arena.take<PartialLse>(rows);
  return arena.bytes();
}

CostHistogram::CostHistogram(std::int32_t longest) {
  while ((longest >> shift_) >= kMaxBuckets) ++shift_;
  counts_.assign((longest >> shift_) + 1, 0);
}

std::int64_t CostHistogram::makespan(std::int64_t cta_slots) const {
  std::int64_t bound = std::max<std::int64_t>(longest_, ceil_div(total(), cta_slots));
  std::int64_t items = 0;
  for (std::int64_t bucket = std::ssize(counts_) - 1; bucket > 0; --bucket) {
    if (counts_[bucket] == 0) continue;
    items += counts_[bucket];
    bound = std::max(bound, ceil_div(items, cta_slots) * (bucket << shift_));
  }
  return bound;
}

SplitEstimate estimate(const SplitProblem& split, std::int32_t chunk_tiles) {
  std::int32_t longest = 0;
  for (const SplitSegment& segment : split.segments) {
    longest = std::max(longest, std::min(segment.longest, segment.chunk_tiles(chunk_tiles)));
  }
  CostHistogram costs(longest + kOverhead);
  SplitEstimate result;
  bool merges = false;
  for (const SplitSegment& segment : split.segments) {
    const SegmentEstimate& of_segment =
        result.segments.add(estimate_segment(segment, segment.chunk_tiles(chunk_tiles), costs));
    result.num_items += of_segment.num_items;
    result.float_bytes += partial_bytes(of_segment.num_partial_rows, segment.head_dim_vo);
    merges |= of_segment.num_merges > 0;
  }
  result.total_cost = costs.total();
  result.makespan = costs.makespan(split.cta_slots);
  result.full_makespan = costs.makespan(split.full_slots);
  if (merges) result.makespan += CostModel::kMerge;
  return result;
}

namespace {

// Longest tile and shortest allowed chunk, in KV tiles, over the segments whose chunk length is to
// be chosen.
struct OpenTiles {
  std::int32_t longest = 0;
  std::int32_t shortest_chunk = 1;
  std::int32_t short_chunk = 1;  // chunks of fewer tiles are short (kShortChunkKeys)

  explicit OpenTiles(const SplitProblem& split) {
    for (int s = 0; s < split.segments.size(); ++s) {
      const SplitSegment& segment = split.segments[s];
      if (segment.asked_chunk > 0 || split.limits.segments[s].rows < 2) continue;
      longest = std::max(longest, segment.longest);
      shortest_chunk = std::max(shortest_chunk, ceil_div(kMinAutoChunkKeys, segment.tile_n));
      short_chunk = std::max(short_chunk, ceil_div(kShortChunkKeys, segment.tile_n));
    }
  }
};

// True if short chunks pay (kShortChunkKeys).
bool allows_short_chunks(const SplitEstimate& estimate, std::int64_t full_slots) {
  std::int64_t rows = 0;
  for (const SegmentEstimate& segment : estimate.segments) rows += segment.num_partial_rows;
  return estimate.num_items <= full_slots && rows <= kMostRowsOfShortChunks;
}

}  // namespace

std::int32_t choose_chunk_tiles(const SplitProblem& split) {
  const OpenTiles open(split);
  if (open.longest < 2 * open.shortest_chunk) return kUnsplit;

  const SplitEstimate unsplit = estimate(split, kUnsplit);
  const auto is_even = [&](std::int64_t makespan, std::int64_t slots) {
    return makespan * 10 <= ceil_div(unsplit.total_cost, slots) * kEvenTenths;
  };
  if (is_even(unsplit.makespan, split.cta_slots)) return kUnsplit;
  if (is_even(unsplit.full_makespan, split.full_slots)) return kUnsplit;

  std::int32_t best = kUnsplit;
  std::int64_t best_makespan = unsplit.makespan * kGainTenths / 10;
  const std::int64_t per_wave = split.cta_slots / unsplit.num_items;
  for (std::int32_t chunk : ladder(open.longest, open.shortest_chunk, per_wave)) {
    const SplitEstimate candidate = estimate(split, chunk);
    if (chunk < open.short_chunk && !allows_short_chunks(candidate, split.full_slots)) continue;
    if (candidate.makespan < best_makespan && fits(candidate, split.limits)) {
      best = chunk;
      best_makespan = candidate.makespan;
    }
  }
  return best;
}

}  // namespace preflash
