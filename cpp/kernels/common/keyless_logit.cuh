// A logit that a row has beside those of its keys, without a value: the sink of its head, where the
// run brings any. Whoever has all of a row's keys counts it, once.
#pragma once

#include "kernels/common/log2.cuh"
#include "preflash/params.h"

namespace preflash {

__device__ __forceinline__ bool has_keyless(const RunExtras& extras) {
  return extras.sinks != nullptr;
}
// In base 2; -inf has no effect.
__device__ __forceinline__ float keyless_logit(const RunExtras& extras, int head) {
  return __ldg(extras.sinks + head) * kLog2E;
}

}  // namespace preflash
