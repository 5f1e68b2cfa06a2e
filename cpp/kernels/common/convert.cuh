// float32 fragments to 16-bit ones, two elements an instruction.
#pragma once

#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

namespace preflash {

// target(i) = source(i), element by element in storage order: the layouts may differ.
template <class Source, class Target>
__device__ __forceinline__ void round_to(const Source& source, Target& target) {
  using namespace cute;
  using To = typename Target::value_type;
  static_assert(decltype(size(source) == size(target))::value);
  Tensor source_pairs = recast<const cutlass::Array<float, 2>>(source);
  Tensor target_pairs = recast<cutlass::Array<To, 2>>(target);
  cutlass::NumericArrayConverter<To, float, 2> convert;
  CUTE_UNROLL
  for (int i = 0; i < size(source_pairs); ++i) target_pairs(i) = convert(source_pairs(i));
}

template <class To, class Fragment>
__device__ __forceinline__ auto convert_fragment(const Fragment& source) {
  cute::Tensor target = cute::make_tensor_like<To>(source);
  round_to(source, target);
  return target;
}

}  // namespace preflash
