// Arithmetic on log-sum-exps in two floats: how the states of one row are weighed and added up.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "preflash/params.h"
#include "preflash/plan.h"

namespace preflash::cpu {

inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNothing = -0.0f;  // added to any number it leaves the bits
inline constexpr PartialLse kEmptyLse{.high = 0.0f, .low = -kInfinity};

// The LSE of weights that add up to 2^log2_sum relative to 2^reference.
inline PartialLse lse_of(double reference, float log2_sum) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  const auto high = static_cast<float>(std::clamp(reference, -kLargest, kLargest));
  double rest = reference - high;
  // The rest, up to half an ulp of the reference, may not push the bits of log2_sum out of
  // `low`: equal keys in several chunks need those. From 2^30 on keys that differ do so by 64 at
  // least, so that only who is larger counts: the rest keeps its order when it is made to stay
  // below 64.
  if (std::abs(high) >= 0x1p30f) rest = std::ldexp(rest, 30 - std::ilogb(high));
  return {.high = high, .low = log2_sum + static_cast<float>(rest)};
}

// The state of a row beside those of its keys, one that has no value, if the run brings any: the
// sink of its head, in natural logarithms; -inf is no sink.
inline std::optional<PartialLse> keyless_lse(const RunExtras& extras, std::int64_t head) {
  if (extras.sinks == nullptr) return std::nullopt;
  const float sink = extras.sinks[head];
  return sink == -kInfinity ? kEmptyLse : lse_of(sink * kLog2E, 0.0f);
}

// a - b. The highs first: where they are large they cancel without a rounding.
inline float difference(const PartialLse& a, const PartialLse& b) {
  return (a.high - b.high) + (a.low - b.low);
}

// Weights 2^(lse - largest) of a row's states, normalised by one sum.
struct MergedLse {
  PartialLse largest = kEmptyLse;
  float sum = 0.0f;

  template <class LseOfState>
  MergedLse(int num_states, const LseOfState& lse_of_state) {
    // NaN stays NaN: the row's result is then NaN, as it is when one pass computes it.
    for (int i = 0; i < num_states; ++i) {
      const bool stays = difference(largest, lse_of_state(i)) >= 0.0f;
      if (!stays) largest = lse_of_state(i);
    }
    for (int i = 0; i < num_states; ++i) sum += weight(lse_of_state(i));
  }
  bool empty() const { return sum == 0.0f; }
  float weight(const PartialLse& lse) const {
    return lse.high + lse.low == -kInfinity ? 0.0f : std::exp2(difference(lse, largest));
  }
  float lse() const { return empty() ? -kInfinity : largest.high + (largest.low + std::log2(sum)); }
};

}  // namespace preflash::cpu
