// A logit that a row has beside those of its keys, without a value: the sink of its head, where the
// run brings any. Whoever has all of a row's keys counts it, once.
#pragma once

#include <cfloat>

#include "kernels/common/log2.cuh"
#include "preflash/params.h"

namespace preflash {

__device__ __forceinline__ bool has_keyless(const RunExtras& extras) {
  return extras.sinks != nullptr;
}
// In base 2; -inf has no effect. What float32 cannot hold there is the largest number of its sign:
// of an infinity the merge of split keys would make NaN.
__device__ __forceinline__ float sink(const RunExtras& extras, int head) {
  const float given = __ldg(extras.sinks + head);
  const float logit = given * kLog2E;
  if (logit > FLT_MAX) return FLT_MAX;
  return logit < -FLT_MAX && given >= -FLT_MAX ? -FLT_MAX : logit;
}

}  // namespace preflash
