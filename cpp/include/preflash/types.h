// The project's vocabulary and the one macro that lets host and device share code. The enums, their
// names and struct Variant are generated from cpp/variants/forward.toml.
#pragma once

#include <string_view>

#include "preflash/vocabulary.h"

#if defined(__CUDACC__)
#define PREFLASH_HD __host__ __device__
#else
#define PREFLASH_HD
#endif

namespace preflash {

// Returns the name by which a caller selects the family.
constexpr std::string_view backend_of(Family family) { return traits_of(family).backend; }

template <class T>
PREFLASH_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace preflash
