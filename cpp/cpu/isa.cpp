#include "cpu/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

// Every C++20 compiler for x86-64 knows AVX2: a build without it forgot to say so, and would be
// slow.
#if defined(__x86_64__) && !defined(PREFLASH_HAVE_AVX2)
#error "compile kernel_avx2.cpp for AVX2 and define PREFLASH_HAVE_AVX2 (cmake/CpuIsa.cmake)"
#endif

namespace preflash::cpu {
namespace {

#if defined(PREFLASH_HAVE_AVX2)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
#endif

#if defined(PREFLASH_HAVE_AVX512)
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

// The widest instruction set that the user allows; empty: any.
std::string_view allowed_isa() {
  const char* value = std::getenv("PREFLASH_CPU_ISA");
  const std::string_view isa = value != nullptr ? value : "";
  if (isa.empty() || isa == "generic" || isa == "avx2" || isa == "avx512") return isa;
  throw std::invalid_argument("PREFLASH_CPU_ISA is '" + std::string(isa) +
                              "' in the environment; must be generic, avx2 or avx512, the widest "
                              "instructions that the CPU backend may use, or unset");
}

IsaKernels choose() {
  [[maybe_unused]] const std::string_view widest = allowed_isa();
#if defined(PREFLASH_HAVE_AVX512)
  if (widest != "generic" && widest != "avx2" && has_avx512()) {
    IsaKernels kernels = *avx512_kernels();
    if (!__builtin_cpu_supports("avx512bf16")) kernels.attend_bf16_pairs = nullptr;
    return kernels;
  }
#endif
#if defined(PREFLASH_HAVE_AVX2)
  if (widest != "generic" && has_avx2()) return *avx2_kernels();
#endif
  return *generic_kernels();
}

}  // namespace

const IsaKernels& isa_kernels() {
  static const IsaKernels kernels = choose();
  return kernels;
}

}  // namespace preflash::cpu
