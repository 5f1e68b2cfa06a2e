// Skipped tiles: those whose logits all lie so far below the maximum that their row
// has had so far that AttentionOptions::skip_factor leaves them out. They are neither
// exponentiated nor multiplied by V.
//
// Rows that do not exist never keep a tile, and neither does a NaN: what a tile that is left out
// holds is not looked at.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/common/launch_params.cuh"

namespace preflash {

template <int kRows>
struct RunningMaxima {
  float top[kRows];     // in units of x, as the scores are
  float margin = 0.0f;  // a tile has weight where it comes so close to the top: 0 or less

  // exists(r): whether row r of this thread does.
  template <class Exists>
  __device__ __forceinline__ static RunningMaxima of(const KernelSegment& segment,
                                                     const RequestInfo& request,
                                                     const Exists& exists) {
    RunningMaxima maxima;
    // A factor of kv_len or more would skip tiles that raise the maximum, so it is limited.
    float bits = log2_approx(segment.skip_factor / static_cast<float>(request.kv_len));
    maxima.margin = fminf(bits, 0.0f) * reciprocal_approx(segment.logits.scale_log2);
#pragma unroll
    for (int r = 0; r < kRows; ++r) maxima.top[r] = exists(r) ? -INFINITY : INFINITY;
    return maxima;
  }

  // Takes up a tile's row maxima; says whether it has weight in one of this thread's rows.
  __device__ __forceinline__ bool take(const float (&tile_max)[kRows]) {
    bool weighs = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      weighs |= tile_max[r] - top[r] >= margin;
      top[r] = fmaxf(top[r], tile_max[r]);
    }
    return weighs;
  }
};

// Placeholder in kernels that multiply every tile.
struct NoRunningMaxima {};

}  // namespace preflash
