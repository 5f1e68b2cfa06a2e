// The rules for values of options and lengths, and the tile class that follows from them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string_view>

#include "planner/message.h"
#include "planner/planner.h"

namespace preflash {
namespace {

constexpr std::int32_t kMaxHeadDim = 512;

using Indptr32 = std::span<const std::int32_t>;

std::string_view kv_indptr_name(const SegmentProblem& problem) {
  return problem.paged() ? "paged_kv_indptr" : "kv_indptr";
}

void check_heads(const SegmentProblem& problem) {
  if (problem.num_qo_heads < 1) {
    refuse("num_qo_heads = ", problem.num_qo_heads, ": must be at least 1");
  }
  if (problem.num_kv_heads < 1 || problem.num_kv_heads > 32767) {
    refuse("num_kv_heads = ", problem.num_kv_heads, ": must be in [1, 32767]");
  }
  if (problem.num_qo_heads % problem.num_kv_heads != 0) {
    refuse("num_qo_heads = ", problem.num_qo_heads,
           " is not a multiple of num_kv_heads = ", problem.num_kv_heads,
           ": each KV head serves the same number of query heads");
  }
}

void check_head_dim(std::string_view name, std::int32_t value) {
  if (value >= 8 && value <= kMaxHeadDim && value % 8 == 0) return;
  const auto rule = ": must be a multiple of 8 from 8 to ";
  if (value < 1) refuse(name, " = ", value, rule, kMaxHeadDim);
  if (value > kMaxHeadDim) {
    refuse(name, " = ", value, rule, kMaxHeadDim,
           ", of which there are kernels. What would work: torch's scaled_dot_product_attention; "
           "for latent attention (576, with 512 for v) keys and values that are expanded to "
           "head_dim 192, with 128 for v");
  }
  refuse(name, " = ", value, rule, kMaxHeadDim,
         ". What would work: q, k and v padded with zeros to ", (value + 7) / 8 * 8,
         " columns, a scale (sm_scale) of 1 / sqrt(", value, ") as before, and the first ", value,
         " columns of the output");
}

void check_rope(const SegmentProblem& problem) {
  const RopeOptions& rope = problem.rope;
  if (problem.position != Position::kRope) {
    if (rope == RopeOptions{}) return;
    refuse("rope_scale = ", rope.scale, ", rope_theta = ", rope.theta,
           ": only position encoding rope has them; leave them at their defaults");
  }
  if (!(rope.scale > 0.0) || !std::isfinite(rope.scale)) {
    refuse("rope_scale = ", rope.scale, ": must be positive and finite");
  }
  if (!(rope.theta > 0.0) || !std::isfinite(rope.theta)) {
    refuse("rope_theta = ", rope.theta, ": must be positive and finite");
  }
}

void check_scalars(const SegmentProblem& problem) {
  check_heads(problem);
  check_head_dim("head_dim_qk", problem.head_dim_qk);
  check_head_dim("head_dim_vo", problem.head_dim_vo);
  check_rope(problem);
  if (problem.window_left < -1 || problem.window_left > kMaxRequestLength) {
    refuse("window_left = ", problem.window_left, ": must be -1 (no window) or in [0, ",
           kMaxRequestLength, "]");
  }
  if (problem.chunk_size < 0 || problem.chunk_size > kMaxRequestLength ||
      (problem.chunk_size & (problem.chunk_size - 1)) != 0) {
    refuse("chunk_size = ", problem.chunk_size, ": must be a power of two up to ",
           kMaxRequestLength, ", or 0 (no chunks)");
  }
  if (!(problem.skip_factor >= 0.0f) || !std::isfinite(problem.skip_factor)) {
    refuse("skip_factor = ", problem.skip_factor, ": must be positive and finite, or 0 (off)");
  }
  if (problem.split.fixed_split_size < 0) {
    refuse("fixed_split_size = ", problem.split.fixed_split_size,
           ": must be a positive number of keys, or None to let the planner choose");
  }
  if (problem.split.fixed_split_size > 0 && !problem.split.is_one_pass() &&
      problem.lengths_are_upper_bounds && problem.reach() >= 0) {
    refuse("fixed_split_size = ", problem.split.fixed_split_size,
           ": keys under a window (window_left = ", problem.window_left, ") or chunks (",
           problem.chunk_size,
           ") of lengths that only the device knows are not split at fixed keys; use "
           "disable_split_kv");
  }
  if (problem.graph_max_rows < 0) {
    refuse("graph_max_rows = ", problem.graph_max_rows, ": must be 0 (no CUDA graph) or positive");
  }
  if (problem.mask == Mask::kBounds && !problem.mask_indptr.empty()) {
    refuse("mask_indptr has ", problem.mask_indptr.size(),
           " elements but no custom mask was given: pass custom_mask or packed_custom_mask too");
  }
}

template <class T>
void check_indptr(std::string_view name, std::span<const T> indptr) {
  // An indptr may start anywhere: rows before the first request, or past the last, belong to none.
  if (indptr[0] < 0) {
    refuse(name, "[0] = ", indptr[0], ": must not be negative; pass cumulative lengths");
  }
  // The first loop, which compilers vectorise, checks all elements; if it fails, the second finds
  // the one to name. The same below.
  T decreases = 0;
  for (std::size_t i = 1; i < indptr.size(); ++i) decreases |= indptr[i] < indptr[i - 1];
  if (decreases == 0) return;
  for (std::size_t i = 1; i < indptr.size(); ++i) {
    if (indptr[i] < indptr[i - 1]) {
      refuse(name, "[", i, "] = ", indptr[i], " is less than ", name, "[", i - 1,
             "] = ", indptr[i - 1], ": it must not decrease; pass cumulative lengths");
    }
  }
}

// Returns the longest length in an indptr that check_indptr() has passed.
std::int64_t longest_in(Indptr32 indptr) {
  std::int32_t longest = 0;
  for (std::size_t i = 1; i < indptr.size(); ++i) {
    longest = std::max(longest, indptr[i] - indptr[i - 1]);
  }
  return longest;
}

void check_sizes(const SegmentProblem& problem) {
  if (problem.qo_indptr.empty()) {
    refuse("qo_indptr is empty: it needs batch_size + 1 elements, [0] for an empty batch");
  }
  std::size_t elements = problem.qo_indptr.size();
  if (elements > static_cast<std::size_t>(kMaxRequestLength)) {
    refuse("qo_indptr has ", elements, " elements: at most ", kMaxRequestLength);
  }
  if (problem.kv_indptr.size() != elements) {
    refuse(kv_indptr_name(problem), " has ", problem.kv_indptr.size(), " elements, qo_indptr has ",
           elements, ": both need batch_size + 1");
  }
  if (problem.paged() && problem.last_page_len.size() + 1 != elements) {
    refuse("paged_kv_last_page_len has ", problem.last_page_len.size(), " elements, qo_indptr has ",
           elements, ": it needs one per request, ", elements - 1);
  }
  if (problem.mask == Mask::kCustom && problem.mask_indptr.size() != elements) {
    refuse("mask_indptr has ", problem.mask_indptr.size(), " elements, qo_indptr has ", elements,
           ": a custom mask needs batch_size + 1 byte offsets");
  }
}

void check_query_lengths(const SegmentProblem& problem) {
  check_indptr("qo_indptr", problem.qo_indptr);
  std::int64_t group = problem.num_qo_heads / problem.num_kv_heads;
  const bool all_fit = longest_in(problem.qo_indptr) * group <= kMaxRequestLength;
  for (std::size_t i = 0; !all_fit && i + 1 < problem.qo_indptr.size(); ++i) {
    std::int64_t length = problem.qo_len(i);
    if (length * group > kMaxRequestLength) {
      refuse("qo_indptr[", i + 1, "]: request ", i, " has ", length, " queries times ", group,
             " query heads per KV head = ", length * group, " rows; at most ", kMaxRequestLength,
             ": cut the request into several");
    }
  }
  std::int32_t rows = problem.qo_indptr.back() - problem.qo_indptr.front();
  if (problem.graph_max_rows > 0 && rows > problem.graph_max_rows) {
    refuse("qo_indptr[-1] - qo_indptr[0] = ", rows, ": a CUDA graph was planned for at most ",
           problem.graph_max_rows,
           " query rows; plan the largest batch first, or use another wrapper for this one");
  }
}

void check_kv_length(const SegmentProblem& problem, std::size_t request, std::int64_t length) {
  if (length > kMaxRequestLength) {
    refuse(kv_indptr_name(problem), "[", request + 1, "]: request ", request, " has ", length,
           " keys; at most ", kMaxRequestLength);
  }
}

void check_ragged_kv(const SegmentProblem& problem) {
  check_indptr("kv_indptr", problem.kv_indptr);
  for (std::size_t i = 0; i + 1 < problem.kv_indptr.size(); ++i) {
    check_kv_length(problem, i, problem.kv_indptr[i + 1] - problem.kv_indptr[i]);
  }
}

bool last_pages_are_right(const SegmentProblem& problem) {
  const auto page_size = static_cast<std::uint32_t>(problem.page_size);
  std::uint32_t wrong = 0;
  for (std::size_t i = 0; i < problem.last_page_len.size(); ++i) {
    const auto before = static_cast<std::uint32_t>(problem.last_page_len[i]) - 1;
    const bool used = problem.kv_indptr[i + 1] != problem.kv_indptr[i];
    wrong |= static_cast<std::uint32_t>(used) & static_cast<std::uint32_t>(before >= page_size);
  }
  return wrong == 0;
}

void check_paged_kv(const SegmentProblem& problem) {
  if (problem.page_size < 1) {
    refuse("page_size = ", problem.page_size, ": must be at least 1");
  }
  check_indptr("paged_kv_indptr", problem.kv_indptr);
  const bool all_fit = longest_in(problem.kv_indptr) * problem.page_size <= kMaxRequestLength;
  if (all_fit && last_pages_are_right(problem)) return;
  for (std::size_t i = 0; i < problem.last_page_len.size(); ++i) {
    std::int64_t pages = problem.kv_indptr[i + 1] - problem.kv_indptr[i];
    std::int32_t last = problem.last_page_len[i];
    // A request without pages has no last page: whatever is said of it does not count.
    if (pages == 0) continue;
    if (last < 1 || last > problem.page_size) {
      refuse("paged_kv_last_page_len[", i, "] = ", last, ": request ", i, " has ", pages,
             " pages of page_size = ", problem.page_size, ", so it must be in [1, ",
             problem.page_size, "]");
    }
    check_kv_length(problem, i, problem.kv_len(i));
  }
}

void check_mask(const SegmentProblem& problem) {
  if (problem.mask_indptr[0] < 0) {
    refuse("mask_indptr[0] = ", problem.mask_indptr[0], ": must not be negative");
  }
  for (std::size_t i = 0; i + 1 < problem.mask_indptr.size(); ++i) {
    std::int64_t queries = problem.qo_len(i);
    std::int64_t keys = problem.kv_len(i);
    std::int64_t needed = ceil_div<std::int64_t>(queries * keys, 8);
    if (problem.mask_indptr[i] > problem.mask_indptr[i + 1] ||
        problem.mask_indptr[i + 1] - problem.mask_indptr[i] < needed) {
      refuse("mask_indptr[", i + 1, "] = ", problem.mask_indptr[i + 1], ": request ", i, " has ",
             queries, " x ", keys, " mask bits, which take ", needed, " bytes from mask_indptr[", i,
             "] = ", problem.mask_indptr[i], "; each request starts on a byte (segment_packbits)");
    }
  }
}

void check_segment(const SegmentProblem& problem) {
  check_scalars(problem);
  check_sizes(problem);
  check_query_lengths(problem);
  if (problem.paged()) {
    check_paged_kv(problem);
  } else {
    check_ragged_kv(problem);
  }
  if (problem.mask == Mask::kCustom) check_mask(problem);
}

}  // namespace

void validate(const Problem& problem) {
  if (problem.float_workspace_bytes < 0) {
    refuse("float_workspace_buffer: its size is ", problem.float_workspace_bytes,
           " bytes; it must not be negative");
  }
  if (problem.segments.size() == 1) return check_segment(problem.segments[0]);
  std::int64_t requests = 0;
  for (int s = 0; s < problem.segments.size(); ++s) {
    const SegmentProblem& segment = problem.segments[s];
    try {
      check_segment(segment);
    } catch (const std::invalid_argument& error) {
      refuse("segment ", s, ": ", error.what());
    }
    requests += std::ssize(segment.qo_indptr) - 1;
    if ((segment.graph_max_rows > 0) != (problem.segments[0].graph_max_rows > 0)) {
      refuse("segment ", s, ": graph_max_rows = ", segment.graph_max_rows, ", segment 0 has ",
             problem.segments[0].graph_max_rows,
             ": a CUDA graph holds the launch as a whole, so both or none have such a limit");
    }
  }
  if (requests > kMaxRequestLength) {
    refuse("the segments have ", requests, " requests together: at most ", kMaxRequestLength);
  }
}

namespace {

// The requests that short tiles are for.
struct ShortRequests {
  std::int64_t rows = 0;  // the most packed ones
  bool alone = false;     // no batch with other requests, however few
};

// Over 16 bits tall tiles need no conversion on load, so short tiles save nothing. Tall tiles read
// long requests as fast, and more rows of a request at once.
ShortRequests short_requests(const SegmentProblem& problem, const FamilyTraits& family) {
  const bool as_stored = family.short_tiles == ShortTiles::kOwn && size_of(problem.kv_dtype) > 1;
  if (as_stored) return {.rows = family.short_rows / 2, .alone = true};
  return {.rows = family.short_rows};
}

// The most keys that a request's rows keep.
std::int64_t kept_keys(const SegmentProblem& problem, std::size_t request) {
  const std::int64_t length = problem.qo_len(request);
  std::int64_t keys = problem.kv_len(request);
  if (problem.window_left >= 0) keys = std::min(keys, problem.window_left + length);
  if (problem.chunk_size > 0) keys = std::min(keys, problem.chunk_size + length);
  return keys;
}

}  // namespace

TileClass choose_tile_class(const SegmentProblem& problem, const FamilyTraits& family) {
  std::int64_t batch = static_cast<std::int64_t>(problem.qo_indptr.size()) - 1;
  if (batch < 1) return TileClass::kPrefill;
  std::int64_t group = problem.num_qo_heads / problem.num_kv_heads;
  bool same_bits = problem.split.is_invariant();
  if (same_bits && family.short_tiles == ShortTiles::kOwn) return TileClass::kPrefill;
  const ShortRequests wanted = short_requests(problem, family);
  if (problem.graph_max_rows > 0) {
    // One request may take all the rows of a later plan.
    std::int64_t requests = same_bits ? 1 : batch;
    std::int64_t rows = ceil_div<std::int64_t>(problem.graph_max_rows, requests) * group;
    return rows <= wanted.rows ? TileClass::kDecode : TileClass::kPrefill;
  }
  // Work in short tiles times keys. The half that causal masking saves tall requests is left out:
  // when it is that close, either class serves. The work is a double, because requests that share
  // pages may have more of it than int64 can count.
  double work_short = 0.0;
  double work_tall = 0.0;
  for (std::size_t i = 0; i + 1 < problem.qo_indptr.size(); ++i) {
    std::int64_t length = problem.qo_len(i);
    const std::int64_t rows = length * group;
    const std::int64_t tiles = rows > wanted.rows ? ceil_div(rows, wanted.rows) : rows > 0;
    if (tiles > 1 && (same_bits || wanted.alone)) return TileClass::kPrefill;
    const std::int64_t keys = kept_keys(problem, i);
    (tiles > 1 ? work_tall : work_short) += static_cast<double>(tiles * (keys + 1));
  }
  return work_short > work_tall ? TileClass::kDecode : TileClass::kPrefill;
}

}  // namespace preflash
