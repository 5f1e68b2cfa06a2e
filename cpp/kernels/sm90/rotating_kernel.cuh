// Which variants have a second kernel, for launches whose keys have been rotated and whose queries
// have not (rotate_query.cuh), and what it takes of shared memory.
#pragma once

#include <cstdint>

#include "preflash/variant.h"

namespace preflash::sm90 {

constexpr bool has_rotating_kernel(const Variant& variant) {
  return variant.position == Position::kNone && variant.mask == Mask::kBounds &&
         variant.arrival == Arrival::kDirect && variant.segments == Segments::kOne &&
         variant.sparsity == Sparsity::kDense && variant.head_dim_qk == variant.head_dim_vo &&
         variant.head_dim_qk <= 128;
}

// V: the generated type of such a variant. NOTE: not an option of its kernel, because a branch that
// is never taken there takes registers from the main loop: docs/dev/experiments.md.
template <class V>
struct RotatesQueries : V {
  static_assert(has_rotating_kernel(V::kVariant));
  static constexpr bool kRotatesQueries = true;
};

template <int kPairs>
struct QueryRotationStorage {
  alignas(16) std::uint64_t frequency[kPairs];  // RotaryFrequencies
};
struct NoQueryRotation {};

}  // namespace preflash::sm90
