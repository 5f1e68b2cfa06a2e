// Four neighbouring elements of a row, as a lane takes them: stored in 8 or 16 bits, and as floats.
#pragma once

#include <cute/config.hpp>
#include <type_traits>

#include "kernels/common/widen.cuh"

namespace preflash {

template <DType kDType>
using FourStored = std::conditional_t<size_of(kDType) == 1, std::uint32_t, uint2>;

struct FourFloats {
  float2 pair[2];

  template <DType kFrom>
  __device__ __forceinline__ static FourFloats of(const FourStored<kFrom>& stored) {
    if constexpr (size_of(kFrom) == 1) {
      FourElements wide = widen<kFrom, DType::kFloat16>(stored);
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
};

}  // namespace preflash
