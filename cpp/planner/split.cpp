#include "planner/split.h"

#include <algorithm>
#include <functional>

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
  return estimate.num_partial_rows <= limits.rows && estimate.num_items <= limits.items &&
         estimate.num_merges <= limits.merges && estimate.num_chunks <= kMaxChunks;
}

}  // namespace

CostHistogram::CostHistogram(std::int32_t longest, std::int64_t num_heads) : num_heads_(num_heads) {
  while ((longest >> shift_) >= kMaxBuckets) ++shift_;
  counts_.assign((longest >> shift_) + 1, 0);
}

std::int64_t CostHistogram::makespan(std::int64_t cta_slots) const {
  std::int64_t bound = std::max<std::int64_t>(longest_, ceil_div(total(), cta_slots));
  std::int64_t items = 0;
  for (std::int64_t bucket = std::ssize(counts_) - 1; bucket > 0; --bucket) {
    if (counts_[bucket] == 0) continue;
    items += counts_[bucket] * num_heads_;
    bound = std::max(bound, ceil_div(items, cta_slots) * (bucket << shift_));
  }
  return bound;
}

SplitEstimate estimate(const SplitProblem& split, std::int32_t chunk_tiles) {
  constexpr std::int32_t kOverhead = CostModel::kItem + CostModel::kPartial;
  CostHistogram costs(std::min(split.longest, chunk_tiles) + kOverhead, split.num_kv_heads);
  SplitEstimate result;
  for (const QueryTile& tile : split.tiles) {
    const ChunkSpan chunks = chunks_of(tile, chunk_tiles);
    const std::int32_t count = chunks.count();
    result.num_items += count;
    result.num_chunks = std::max(result.num_chunks, chunks.last + 1);
    if (count == 1) {
      costs.add(tile.kv_tiles() + CostModel::kItem);
      continue;
    }
    costs.add((chunks.first + 1) * chunk_tiles - tile.kv_begin + kOverhead);
    costs.add(tile.kv_end - chunks.last * chunk_tiles + kOverhead);
    if (count > 2) costs.add(chunk_tiles + kOverhead, count - 2);
    // NOTE: more chunks than can be numbered are refused; counting their rows might overflow.
    result.num_partial_rows += std::int64_t{std::min(count, kMaxChunks)} * tile.rows;
    ++result.num_merges;
  }
  result.num_items *= split.num_kv_heads;
  result.num_partial_rows *= split.num_kv_heads;
  result.num_merges *= split.num_kv_heads;
  result.total_cost = costs.total();
  result.makespan = costs.makespan(split.cta_slots);
  if (result.num_merges > 0) result.makespan += CostModel::kMerge;
  return result;
}

std::int32_t choose_chunk_tiles(const SplitProblem& split) {
  if (split.limits.rows < 2 || split.tiles.empty()) return kUnsplit;
  const std::int32_t shortest_chunk = ceil_div(kMinAutoChunkKeys, split.tile_n);
  if (split.longest < 2 * shortest_chunk) return kUnsplit;

  const SplitEstimate unsplit = estimate(split, kUnsplit);
  const std::int64_t ideal = ceil_div(unsplit.total_cost, split.cta_slots);
  if (unsplit.makespan * 10 <= ideal * kEvenTenths) return kUnsplit;

  std::int32_t best = kUnsplit;
  std::int64_t best_makespan = unsplit.makespan * kGainTenths / 10;
  const std::int64_t per_wave = split.cta_slots / unsplit.num_items;
  for (std::int32_t chunk : ladder(split.longest, shortest_chunk, per_wave)) {
    const SplitEstimate candidate = estimate(split, chunk);
    if (candidate.makespan < best_makespan && fits(candidate, split.limits)) {
      best = chunk;
      best_makespan = candidate.makespan;
    }
  }
  return best;
}

}  // namespace preflash
