// Four neighbouring elements of a row, as a lane takes them: stored in 8 or 16 bits, and as floats.
#pragma once

#include <cuda_fp8.h>

#include <cute/config.hpp>
#include <type_traits>

#include "kernels/common/dequantize.cuh"

namespace preflash {

template <DType kDType>
using FourStored = std::conditional_t<size_of(kDType) == 1, std::uint32_t, uint2>;

struct FourFloats {
  float2 pair[2];

  template <DType kFrom>
  __device__ __forceinline__ static FourFloats of(const FourStored<kFrom>& stored) {
    if constexpr (size_of(kFrom) == 1) {
      FourElements wide = dequantize<kFrom, DType::kFloat16>(stored);
      return {Pair<DType::kFloat16>::to_floats(wide.pair[0]),
              Pair<DType::kFloat16>::to_floats(wide.pair[1])};
    } else {
      return {Pair<kFrom>::to_floats(stored.x), Pair<kFrom>::to_floats(stored.y)};
    }
  }
  __device__ __forceinline__ void multiply(float factor) {
    CUTE_UNROLL
    for (float2& x : pair) x = {x.x * factor, x.y * factor};
  }
  __device__ __forceinline__ float maximum() const {  // of the absolute values
    return fmaxf(fmaxf(fabsf(pair[0].x), fabsf(pair[0].y)),
                 fmaxf(fabsf(pair[1].x), fabsf(pair[1].y)));
  }
  template <DType kTo>
  __device__ __forceinline__ void store(void* target) const {
    *static_cast<uint2*>(target) =
        make_uint2(Pair<kTo>::from_floats(pair[0]), Pair<kTo>::from_floats(pair[1]));
  }
  // Rounded to e4m3. Numbers beyond 448 become 448.
  __device__ __forceinline__ std::uint32_t e4m3() const {
    const auto low = __nv_cvt_float2_to_fp8x2(pair[0], __NV_SATFINITE, __NV_E4M3);
    return low | __nv_cvt_float2_to_fp8x2(pair[1], __NV_SATFINITE, __NV_E4M3) << 16;
  }
};

// The power of two that brings a row's largest element into (224, 448], where e4m3 ends. A row with
// inf becomes NaN.
__device__ __forceinline__ float e4m3_factor(float maximum) {
  if (maximum == 0.0f) return 1.0f;
  if (maximum == INFINITY) return NAN;
  // 448 is 1.75 * 2^8: a larger fraction counts as the next power of two.
  const unsigned exponent = (__float_as_uint(maximum) + 0x1fffffu) >> 23;
  return __uint_as_float(min(2 * 127 + 8 - exponent, 253u) << 23);
}
// Exact, of a power of two.
__device__ __forceinline__ float inverse_power(float power) {
  return __uint_as_float(0x7f000000u - __float_as_uint(power));
}

// The power of two that brings a row of bfloat16 into float16's range: 1 where its largest
// element lies in [2^-4, 2^15), and what it takes to bring that below 2^15 otherwise. What
// float16 then rounds is less than 2^-21 of the largest. The scores are divided by it
// (sm90/scores.cuh).
__device__ __forceinline__ float narrowing_factor(float maximum) {
  if (maximum == 0.0f || (maximum >= 0x1p-4f && maximum < 0x1p15f)) return 1.0f;
  int exponent = static_cast<int>(__float_as_uint(maximum) >> 23) - 127;  // 128: inf
  return __uint_as_float(static_cast<unsigned>(127 + min(14 - exponent, 126)) << 23);
}

}  // namespace preflash
