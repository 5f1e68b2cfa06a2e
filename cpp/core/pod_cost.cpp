#include "core/pod_cost.h"

#include <algorithm>
#include <cstdint>

#include "preflash/mask_range.h"

namespace preflash {
namespace {

// In microseconds, by the estimated time of both sides: below the first value the time between two
// launches dominates; below the second, one launch pays even if it saves nothing else.
constexpr double kWorthTelling = 90.0;
constexpr double kBetweenLaunches = 10.0;
constexpr double kBytesPerMicrosecond = 2.95e6;
// Rows of Q that give every SM of an H100 a tile. Fewer rows hold their CTAs to the end of a
// persistent launch, and the decode batch has only the other CTAs.
constexpr std::int64_t kRowsOfAllSms = 128 * 128;

std::int64_t length(const KeySpan& keys) { return std::max(keys.end - keys.begin, 0); }

// The time of a batch alone, in operations: as its products or its reads take longer.
double time_alone(const PlanRequest& request, int flops_per_byte) {
  const AttentionOptions& options = request.options;
  double pairs = 0.0, keys = 0.0;
  for (int r = 0; r < request.batch->num_requests(); ++r) {
    const auto qo_len = static_cast<std::int32_t>(request.batch->qo_len(r));
    if (qo_len == 0) continue;
    const RequestInfo info{.qo_len = qo_len,
                           .kv_len = static_cast<std::int32_t>(request.batch->kv_len(r))};
    const MaskBounds bounds = bounds_of(options, info);
    const std::int32_t middle = qo_len / 2;
    pairs += static_cast<double>(qo_len) * length(touched_keys(bounds, {middle, middle}));
    keys += static_cast<double>(length(touched_keys(bounds, {0, qo_len - 1})));
  }
  const double columns = options.head_dim_qk + options.head_dim_vo;
  const double flops = 2.0 * pairs * options.num_qo_heads * columns;
  const double bytes = keys * options.num_kv_heads * columns * size_of(options.kv_dtype);
  return std::max(flops, bytes * flops_per_byte);
}

std::int64_t query_rows(const PlanRequest& request) {
  std::int64_t tokens = 0;
  for (int r = 0; r < request.batch->num_requests(); ++r) tokens += request.batch->qo_len(r);
  return tokens * request.options.num_qo_heads;
}

}  // namespace

bool prefer_two_launches(const FamilyTraits& family, const PlanRequest& prefill,
                         const PlanRequest& decode) {
  if (family.flops_per_byte == 0) return false;
  const double of_prefill = time_alone(prefill, family.flops_per_byte);
  const double of_decode = time_alone(decode, family.flops_per_byte);
  const double microseconds =
      (of_prefill + of_decode) / (kBytesPerMicrosecond * family.flops_per_byte);
  if (prefill.options.head_dim_qk < family.joint_head_dim) return microseconds > kBetweenLaunches;
  if (microseconds < kWorthTelling) return false;
  return of_prefill > family.most_prefill * of_decode ||
         of_decode > family.most_decode * of_prefill ||
         (family.schedule == Schedule::kPersistent && query_rows(prefill) < kRowsOfAllSms);
}

}  // namespace preflash
