// Element types of the small kernels: conversion from and to float, and the dispatch from DType.
// These kernels use no tensor cores, so that CUDA's own types do, without CUTLASS.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "preflash/types.h"

namespace preflash {

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounds to nearest even; to 8 bits, what rounds beyond the largest number is that.
template <class T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {
    return __nv_fp8_e4m3(value);
  } else {
    return value;
  }
}

// kWidth neighbouring elements, loaded and stored by one instruction.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth) Pack {
  T element[kWidth];
};

template <class T>
struct TypeTag {
  using type = T;
};

// Calls visit(TypeTag<T>{}) with the CUDA type of `dtype`; other dtypes are an invalid value.
template <class Visitor>
cudaError_t dispatch_element(DType dtype, Visitor visit) {
  switch (dtype) {
    case DType::kFloat16: return visit(TypeTag<__half>{});
    case DType::kBFloat16: return visit(TypeTag<__nv_bfloat16>{});
    case DType::kFloat32: return visit(TypeTag<float>{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace preflash
