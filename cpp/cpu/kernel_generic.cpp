#include <cstdint>

#include "cpu/isa.h"

namespace preflash::cpu {
namespace generic {

// clang-format off: in this order, each uses what the one before it defines
#include "cpu/simd_generic.h"
#include "cpu/rows_fp8.inl"
#include "cpu/rows_portable.inl"
#include "cpu/kernel_body.inl"
// clang-format on

constexpr IsaKernels kKernels = {
    .name = "generic",
    .lanes = kLanes,
    .huge_logit = kHugeLogit,
    .widen = widen,
    .narrow = narrow,
    .accumulate = accumulate,
    .rotate = rotate,
    .attend = attend,
};

}  // namespace generic

const IsaKernels* generic_kernels() { return &generic::kKernels; }

}  // namespace preflash::cpu
