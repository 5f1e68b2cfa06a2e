#include "core/prepass.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace preflash {
namespace {

constexpr double kRowElements = 128.0;
constexpr double kPassLaunch = 15000.0;  // in units of Conversion::key: 3 us

// The family's row for the kernel, with the time of a key in that of a row of the problem.
Conversion conversion(const SegmentProblem& problem, const ForwardKernel& converting) {
  const bool rotates = problem.position == Position::kRope;
  const bool products = !rotates && converting.variant.load == Load::kDirect;
  const auto matches = [&](const Conversion& row) {
    return row.rotates == rotates && row.products_of_8_bits == products &&
           std::max(problem.head_dim_qk, problem.head_dim_vo) <= row.most_head_dim &&
           problem.head_dim_vo <= row.most_vo;
  };
  const auto rows = conversions_of(converting.variant.family);
  const auto row = std::ranges::find_if(rows, matches);
  if (row == rows.end()) return {};
  Conversion found = *row;
  if (problem.paged() && problem.page_size % 8 != 0) found.key = found.gathered_key;
  if (found.of_columns) {
    found.key *= (problem.head_dim_qk + problem.head_dim_vo) / (2 * kRowElements);
  }
  return found;
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
