// The project's vocabulary: small enums and the one macro that lets host and device share code.
// Standard headers only, so that the planner, the CPU backend and the kernels all include it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#if defined(__CUDACC__)
#define PREFLASH_HD __host__ __device__
#else
#define PREFLASH_HD
#endif

namespace preflash {

enum class DType : std::uint8_t { kFloat16, kBFloat16, kFloat32, kFloat8E4M3, kFloat8E5M2 };

constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16: return 2;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return 1;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return "f16";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat32: return "f32";
    case DType::kFloat8E4M3: return "e4m3";
    case DType::kFloat8E5M2: return "e5m2";
  }
  return "?";
}

// A kernel family is a set of sources; a backend is what a caller names: cpu, fa2 (sm80), fa3
// (sm90).
enum class Family : std::uint8_t { kCpu, kSm80, kSm90 };

constexpr std::string_view name_of(Family family) {
  switch (family) {
    case Family::kCpu: return "cpu";
    case Family::kSm80: return "sm80";
    case Family::kSm90: return "sm90";
  }
  return "?";
}

constexpr std::string_view backend_of(Family family) {
  switch (family) {
    case Family::kCpu: return "cpu";
    case Family::kSm80: return "fa2";
    case Family::kSm90: return "fa3";
  }
  return "?";
}

// What happens to a logit between the scale and the mask.
enum class Logits : std::uint8_t { kPlain, kSoftCap };

constexpr std::string_view name_of(Logits logits) {
  return logits == Logits::kPlain ? "plain" : "softcap";
}

// kBounds: length, causal and window, all run-time loop bounds. kCustom: a bit mask, ANDed with
// them.
enum class Mask : std::uint8_t { kBounds, kCustom };

constexpr std::string_view name_of(Mask mask) {
  return mask == Mask::kBounds ? "bounds" : "custom";
}

// kPrefill: tall tiles for many rows. kDecode: short tiles for requests with few packed rows.
enum class TileClass : std::uint8_t { kPrefill, kDecode };

constexpr std::string_view name_of(TileClass tile) {
  return tile == TileClass::kPrefill ? "prefill" : "decode";
}

template <class T>
PREFLASH_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

}  // namespace preflash
