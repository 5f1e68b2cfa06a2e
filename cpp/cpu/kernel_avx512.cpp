// Compiled for AVX-512 (F, BW, VL, DQ, BF16) with FMA and F16C, and called only where the machine
// has them; attend_bf16_pairs alone needs BF16.

// GCC's own AVX-512 header passes values that are undefined on purpose and warns about them.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include <cstdint>

#include "cpu/isa.h"

namespace preflash::cpu {
namespace avx512 {

// clang-format off: in this order, each uses what the one before it defines
#include "cpu/simd_avx512.h"
#include "cpu/rows_fp8.inl"
#include "cpu/rows_f16c.inl"
#include "cpu/kernel_body.inl"
// clang-format on

constexpr IsaKernels kKernels = {
    .name = "avx512",
    .lanes = kLanes,
    .huge_logit = kHugeLogit,
    .widen = widen,
    .narrow = narrow,
    .accumulate = accumulate,
    .rotate = rotate,
    .attend = attend,
#if defined(PREFLASH_BF16_PAIRS)
    .attend_bf16_pairs = attend_bf16_pairs,
#endif
};

}  // namespace avx512

const IsaKernels* avx512_kernels() { return &avx512::kKernels; }

}  // namespace preflash::cpu
