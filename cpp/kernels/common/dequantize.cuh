// 8-bit elements to 16-bit ones, which hold every value of theirs, infinities and NaN included; and
// pairs of 16-bit elements to floats and back. Everything here also runs on the host, where it is
// checked byte by byte.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "preflash/types.h"

namespace preflash {

// Two neighbouring 16-bit elements as they lie in a register, the first in the lower half.
template <DType kDType>
struct Pair;

template <>
struct Pair<DType::kFloat16> {
  using Vector = __half2;
  using Raw = __half2_raw;
  static constexpr int kExponentBits = 5;

  PREFLASH_HD static std::uint32_t product(std::uint32_t pair, float x) {
    return std::bit_cast<std::uint32_t>(
        Raw(__hmul2(Vector(std::bit_cast<Raw>(pair)), __float2half2_rn(x))));
  }
  PREFLASH_HD static float2 to_floats(std::uint32_t pair) {
    return __half22float2(Vector(std::bit_cast<Raw>(pair)));
  }
  PREFLASH_HD static std::uint32_t from_floats(float2 x) {
    return std::bit_cast<std::uint32_t>(Raw(__floats2half2_rn(x.x, x.y)));
  }
};

template <>
struct Pair<DType::kBFloat16> {
  using Vector = __nv_bfloat162;
  using Raw = __nv_bfloat162_raw;
  static constexpr int kExponentBits = 8;

  PREFLASH_HD static std::uint32_t product(std::uint32_t pair, float x) {
    return std::bit_cast<std::uint32_t>(
        Raw(__hmul2(Vector(std::bit_cast<Raw>(pair)), __float2bfloat162_rn(x))));
  }
  PREFLASH_HD static float2 to_floats(std::uint32_t pair) {
    return {std::bit_cast<float>(pair << 16), std::bit_cast<float>(pair & 0xffff0000u)};
  }
  PREFLASH_HD static std::uint32_t from_floats(float2 x) {
    return std::bit_cast<std::uint32_t>(Raw(__floats2bfloat162_rn(x.x, x.y)));
  }
};

// Four 16-bit elements; the first two are pair[0].
struct FourElements {
  std::uint32_t pair[2];
};

// An 8-bit format. A byte is no finite number if its bits of `special` are all ones.
struct Fp8Format {
  int exponent_bits;
  std::uint32_t special;  // for each of four bytes

  static constexpr Fp8Format of(DType dtype) {
    return dtype == DType::kFloat8E4M3 ? Fp8Format{4, 0x7f7f7f7fu} : Fp8Format{5, 0x7c7c7c7cu};
  }
};

// Bytes 2 * i and 2 * i + 1, each in the upper half of its 16-bit lane.
PREFLASH_HD constexpr std::uint32_t spread_bytes(std::uint32_t four, int i) {
#ifdef __CUDA_ARCH__
  return __byte_perm(four, 0, i == 0 ? 0x1404 : 0x3424);
#else
  std::uint32_t two = four >> (16 * i);
  return (two & 0xff) << 8 | (two & 0xff00) << 16;
#endif
}

// Dequantises by bit operations, for targets without conversion instructions. Sign, exponent and
// fraction move to their places in the wider format, where a product with the difference of the
// biases also normalises what was subnormal. Special values get the exponent of all ones and keep
// their fraction, which distinguishes them.
template <DType kFrom, DType kTo>
PREFLASH_HD FourElements dequantize_by_bits(std::uint32_t four) {
  using To = Pair<kTo>;
  constexpr Fp8Format kFormat = Fp8Format::of(kFrom);
  constexpr int kMoreBits = To::kExponentBits - kFormat.exponent_bits;
  if constexpr (kMoreBits == 0) return {spread_bytes(four, 0), spread_bytes(four, 1)};

  constexpr int kBias = (1 << (To::kExponentBits - 1)) - (1 << (kFormat.exponent_bits - 1));
  constexpr float kRebias = std::bit_cast<float>((127 + kBias) << 23);  // 2^kBias
  FourElements result;
  for (int i = 0; i < 2; ++i) {
    std::uint32_t lanes = spread_bytes(four, i);
    std::uint32_t placed = (lanes & 0x80008000u) | (lanes & 0x7fff7fffu) >> kMoreBits;
    result.pair[i] = To::product(placed, kRebias);
  }
  // Adding its lowest bit to a byte that is all ones there carries into the sign's place.
  constexpr std::uint32_t kLowest = kFormat.special & (0x01010101u + ~kFormat.special);
  std::uint32_t special = ((four & kFormat.special) + kLowest) & 0x80808080u;
  if (special != 0) {
    for (int i = 0; i < 2; ++i) {
      std::uint32_t signs = spread_bytes(special, i);
      result.pair[i] |= signs - (signs >> To::kExponentBits);  // a sign's place to those after it
    }
  }
  return result;
}

// Four elements of 8 bits, the first in the lowest byte.
template <DType kFrom, DType kTo>
PREFLASH_HD FourElements dequantize(std::uint32_t four) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  constexpr auto kInterpretation = kFrom == DType::kFloat8E4M3 ? __NV_E4M3 : __NV_E5M2;
  FourElements result;
  for (int i = 0; i < 2; ++i) {
    auto two = static_cast<__nv_fp8x2_storage_t>(four >> (16 * i));
    __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(two, kInterpretation);
    if constexpr (kTo == DType::kFloat16) {
      result.pair[i] = std::bit_cast<std::uint32_t>(halves);
    } else {
      // Their upper halves hold all bits of it.
      float2 floats = __half22float2(__half2(halves));
      result.pair[i] = __byte_perm(__float_as_uint(floats.x), __float_as_uint(floats.y), 0x7632);
    }
  }
  return result;
#else
  return dequantize_by_bits<kFrom, kTo>(four);
#endif
}
// Eight elements of 8 bits.
template <DType kFrom, DType kTo>
PREFLASH_HD uint4 dequantize(uint2 eight) {
  FourElements low = dequantize<kFrom, kTo>(eight.x);
  FourElements high = dequantize<kFrom, kTo>(eight.y);
  return {low.pair[0], low.pair[1], high.pair[0], high.pair[1]};
}

// Calls visit(constant) with a dtype of 8 bits.
template <class Visitor>
PREFLASH_HD void dispatch_8_bits(DType dtype, const Visitor& visit) {
  if (dtype == DType::kFloat8E4M3) {
    visit(std::integral_constant<DType, DType::kFloat8E4M3>{});
  } else {
    visit(std::integral_constant<DType, DType::kFloat8E5M2>{});
  }
}

}  // namespace preflash
