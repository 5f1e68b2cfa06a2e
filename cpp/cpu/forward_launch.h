// The CPU's kernels as the registry lists them: one entry per generated variant type.
#pragma once

#include "cpu/forward.h"
#include "preflash/params.h"
#include "preflash/variant.h"

namespace preflash::cpu {

// Items are handed to threads one by one in the order of the list, so the CTAs that the plan
// assigned them to do not matter here; there is no stream either: the call returns when the work is
// done.
inline LaunchError launch_forward(const ForwardParams& params, int /*num_ctas*/,
                                  const LaunchTarget& target) {
  return run_forward(params, target.num_threads);
}

template <class V>
ForwardKernel forward_kernel_entry() {
  static_assert(V::kVariant.family == Family::kCpu);
  return {.id = V::kId,
          .variant = V::kVariant,
          .tile = V::kTile,
          .launch = &launch_forward,
          .tracing = Tracing::kItems};
}

}  // namespace preflash::cpu
