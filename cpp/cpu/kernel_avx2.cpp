// Compiled for AVX2, FMA and F16C, and called only where the machine has them.
#include <immintrin.h>

#include <cstdint>

#include "cpu/isa.h"

namespace preflash::cpu {
namespace avx2 {

// clang-format off: in this order, each uses what the one before it defines
#include "cpu/simd_avx2.h"
#include "cpu/rows_fp8.inl"
#include "cpu/rows_f16c.inl"
#include "cpu/kernel_body.inl"
// clang-format on

constexpr IsaKernels kKernels = {
    .name = "avx2",
    .lanes = kLanes,
    .huge_logit = kHugeLogit,
    .widen = widen,
    .narrow = narrow,
    .accumulate = accumulate,
    .rotate = rotate,
    .attend = attend,
};

}  // namespace avx2

const IsaKernels* avx2_kernels() { return &avx2::kKernels; }

}  // namespace preflash::cpu
