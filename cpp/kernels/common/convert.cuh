// float32 fragments to 16-bit ones, two elements an instruction.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace preflash {

template <class To, class Fragment>
__device__ __forceinline__ auto convert_fragment(const Fragment& source) {
  using namespace cute;
  Tensor target = make_tensor_like<To>(source);
  Tensor source_pairs = recast<const cutlass::Array<float, 2>>(source);
  Tensor target_pairs = recast<cutlass::Array<To, 2>>(target);
  cutlass::NumericArrayConverter<To, float, 2> convert;
  CUTE_UNROLL
  for (int i = 0; i < size(source_pairs); ++i) target_pairs(i) = convert(source_pairs(i));
  return target;
}

}  // namespace preflash
