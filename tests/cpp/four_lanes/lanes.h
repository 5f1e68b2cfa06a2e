// Compiles device headers for the host: a thread is one of the four lanes that share a row, and the
// warp has no others. Included before them (-include).
#pragma once

#include <cuda_fp16.h>
#include <vector_types.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cmath>

inline constexpr int kLanes = 4;
inline thread_local int lane;
inline thread_local uint3 threadIdx = {};
inline std::barrier<> lanes_meet(kLanes);

// Returns the x of every lane. All lanes call it, as those of a warp do.
template <class T>
std::array<T, kLanes> of_lanes(T x) {
  static std::array<T, kLanes> shared;
  shared[lane] = x;
  lanes_meet.arrive_and_wait();
  const std::array<T, kLanes> found = shared;
  lanes_meet.arrive_and_wait();
  return found;
}

inline float __shfl_xor_sync(unsigned, float x, int mask) { return of_lanes(x)[lane ^ mask]; }
inline unsigned __ballot_sync(unsigned, bool x) {
  unsigned bits = 0;
  const auto all = of_lanes(x);
  for (int l = 0; l < kLanes; ++l) bits |= unsigned{all[l]} << l;
  return bits;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
// CUTLASS names these in templates that are not used here.
int __dp4a(int, int, int);
unsigned __byte_perm(unsigned, unsigned, unsigned);
__half2 __hfma2(__half2, __half2, __half2);
inline float __ldg(const float* x) { return *x; }

// PTX does not assemble here.
#define exp2_approx exp2_of_ptx
#define log2_approx log2_of_ptx
#define reciprocal_approx reciprocal_of_ptx
#include "kernels/common/logits.cuh"
#undef exp2_approx
#undef log2_approx
#undef reciprocal_approx

namespace preflash {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }

}  // namespace preflash
