#include "core/prepass.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace preflash {
namespace {

constexpr double kRowElements = 128.0;
constexpr double kPassLaunch = 15000.0;  // in units of Conversion: 3 us

// Extra time per query tile of 128 rows of a kernel that reads 8 bits, or rotates, over the kernel
// that reads copies. key: per key of the tile, in units of 0.2 ns, the time to copy a row of 128
// elements in 16 bits. queries: for the tile's queries, in keys. Fitted to an H100, above head_dim
// 128 to an H200 (docs/dev/experiments/fp8-and-rope.md, head-dim-512.md).
struct Conversion {
  double key;
  double queries = 0.0;
};

Conversion conversion(const SegmentProblem& problem, const ForwardKernel& converting) {
  const double rows = (problem.head_dim_qk + problem.head_dim_vo) / (2 * kRowElements);
  const int head_dim = std::max(problem.head_dim_qk, problem.head_dim_vo);
  const bool on_sm90 = converting.traits.dequantization == Dequantization::kToFloat16;
  if (problem.position == Position::kRope) {
    if (!on_sm90) return {0.40 * rows};
    if (head_dim > 256) return {1.25 * rows, 700};
    if (head_dim > 128) return {1.9, 50};
    return {0.25 * rows, 700};
  }
  if (!on_sm90) return {0.46 * rows};
  if (converting.variant.load == Load::kDirect) return {0.086, 600};  // products of 8 bits
  // TMA brings rows of 8 bits, unless a page is no multiple of 8.
  const bool gathered = problem.paged() && problem.page_size % 8 != 0;
  if (head_dim > 256) return {(gathered ? 0.25 : 0.175) * rows, 1160};
  if (head_dim > 128) {
    // (192, 128) is converted by the kernel of 256.
    if (problem.head_dim_vo <= 128) return {0.68, 300};
    return {gathered ? 0.54 : 0.41, 680};
  }
  if (head_dim <= 64) return {0.065, 1500};
  return {gathered ? 0.080 : 0.045, 2500};
}

bool is_rotated(const AttentionOptions& options) { return options.position == Position::kRope; }

// A kernel that converts on load rotates 8 bits into float16, whatever it writes.
bool rounds_more(const AttentionOptions& options) {
  return is_rotated(options) && size_of(options.q_dtype) == 1 &&
         options.o_dtype == DType::kBFloat16;
}

std::int64_t copy_bytes(std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  // At least one row, so that an empty copy has an address.
  const std::int64_t bytes = std::max<std::int64_t>(rows, 1) * heads * head_dim * 2;
  return ceil_div(bytes, kCopyAlignment) * kCopyAlignment;
}

// Total of keys that the query tiles of a request read for one KV head. of_queries: added per tile
// (Conversion::queries).
double keys_of_tiles(const SegmentProblem& problem, std::size_t request, std::int32_t tile_rows,
                     double of_queries) {
  const auto queries = static_cast<double>(problem.qo_len(request));
  const auto keys = static_cast<double>(problem.kv_len(request));
  const double group = problem.gqa_ratio();
  const double tiles = std::ceil(queries * group / tile_rows);
  const double tile_tokens = tile_rows / group;
  double of_tile = keys;
  if (problem.causal) of_tile = std::max(keys - queries / 2, keys / 2);
  if (problem.window_left >= 0) of_tile = std::min(of_tile, problem.window_left + tile_tokens);
  if (problem.chunk_size > 0) of_tile = std::min(of_tile, problem.chunk_size + tile_tokens);
  return tiles * (of_tile + of_queries);
}

// True if copies take less time than they save.
bool prepass_is_faster(const SegmentProblem& problem, const ForwardKernel& converting) {
  const bool narrow = size_of(problem.kv_dtype) == 1;
  const double of_k = problem.head_dim_qk / kRowElements;
  const double of_v = problem.head_dim_vo / kRowElements;
  const Conversion added = conversion(problem, converting);
  double tile_keys = 0.0, keys = 0.0, queries = 0.0;
  for (std::size_t i = 0; i + 1 < problem.qo_indptr.size(); ++i) {
    tile_keys += keys_of_tiles(problem, i, converting.tile.m, added.queries);
    keys += static_cast<double>(problem.kv_len(i));
    queries += static_cast<double>(problem.qo_len(i));
  }
  const double saved = added.key * tile_keys * problem.num_kv_heads * converting.tile.m / 128;
  const double of_key = of_k + (narrow || problem.paged() ? of_v : 0.0);
  double cost = kPassLaunch + keys * problem.num_kv_heads * of_key * (narrow ? 0.75 : 1.0);
  if (is_rotated(problem) || size_of(problem.q_dtype) == 1) {
    cost += queries * problem.num_qo_heads * of_k;
  }
  return saved > cost;
}

}  // namespace

std::optional<AttentionOptions> prepass_options(AttentionOptions options) {
  if (size_of(options.kv_dtype) > 1 && !is_rotated(options)) return std::nullopt;
  // 8 bits are exact in both 16-bit dtypes. Rotated rows are rounded to the output's dtype, as
  // queries of that dtype are.
  const DType product = size_of(options.q_dtype) == 1 ? options.o_dtype : options.q_dtype;
  if (size_of(product) != 2 || options.o_dtype != product) return std::nullopt;
  options.q_dtype = options.kv_dtype = product;
  if (is_rotated(options)) options.position = Position::kNone;
  options.rope = {};
  return options;
}

bool prefers_prepass(const SegmentProblem& problem, const ForwardKernel& converting) {
  if (problem.prepass != Prepass::kAuto) return problem.prepass == Prepass::kAlways;
  // Copies change the last bits, and a fixed split promises the same bits in every batch.
  if (problem.split.is_invariant()) return false;
  // No copies either if they are rounded to fewer bits than the kernel keeps.
  if (rounds_more(problem)) return false;
  if (converting.traits.operands != Operands::kComputed) return false;
  // Nor where it multiplies what it reads, but for products of 8 bits at head_dim 64: the
  // exponentials limit these, and the tiles of 16 bits hide them better.
  const bool narrow_products =
      size_of(converting.variant.q_dtype) == 1 && converting.variant.head_dim_qk == 64;
  const bool may_gain = converting.variant.load == Load::kConverted || narrow_products;
  return may_gain && prepass_is_faster(problem, converting);
}

bool has_prepass_rows(const SegmentProblem& problem) {
  std::int64_t keys = 0;
  for (std::size_t i = 0; i + 1 < problem.qo_indptr.size(); ++i) keys += problem.kv_len(i);
  return keys <= std::numeric_limits<std::int32_t>::max();
}

PrepassForm::PrepassForm(const SegmentProblem& problem, const AttentionOptions& options,
                         const ForwardKernel& kernel)
    : options_(options), kernel_(&kernel), kv_indptr_(1, 0) {
  std::int64_t keys = 0;
  for (std::size_t i = 0; i + 1 < problem.qo_indptr.size(); ++i) {
    keys += problem.kv_len(i);
    kv_indptr_.push_back(static_cast<std::int32_t>(keys));
  }
  k_bytes_ = copy_bytes(keys, problem.num_kv_heads, problem.head_dim_qk);
  if (problem.kv_dtype != options.kv_dtype || problem.paged()) {
    v_ = PrepassPlace::kWorkspace;
    v_bytes_ = copy_bytes(keys, problem.num_kv_heads, problem.head_dim_vo);
  }
  if (!is_rotated(problem) && problem.q_dtype == options.q_dtype) return;
  // An item that has its rows to itself reads them before it writes as many in their place.
  const bool own_rows = kernel.ctas_per_item == 1 && problem.head_dim_qk == problem.head_dim_vo;
  q_ = own_rows ? PrepassPlace::kOut : PrepassPlace::kWorkspace;
  if (own_rows) return;
  q_bytes_ = copy_bytes(problem.qo_indptr.back(), problem.num_qo_heads, problem.head_dim_qk);
}

SegmentProblem PrepassForm::problem_of_kernel(SegmentProblem problem) const {
  static_cast<AttentionOptions&>(problem) = options_;
  problem.kv_indptr = kv_indptr_;
  problem.last_page_len = {};
  problem.page_begin = {};
  problem.page_size = 0;
  return problem;
}

}  // namespace preflash
