// Helpers for the checker's cases: poisoned device arrays of exact size, comparison, and the
// double-precision merge of attention states.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "preflash/device_services.h"

extern "C" const preflash::DeviceServices* preflash_device_services();

namespace check {

using namespace preflash;
using std::int32_t;
using std::int64_t;
using std::uint8_t;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr unsigned char kPoison = 0xAB;

inline const DeviceServices& services = *preflash_device_services();
inline std::mt19937 rng(20240607);
inline int num_failures = 0;

inline void expect(bool ok, const std::string& what) {
  if (!ok && ++num_failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
inline void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}
inline void accept(LaunchError error) {
  if (error == nullptr) return;
  std::printf("refused: %s\n", error);
  std::exit(1);
}
inline bool says(LaunchError error, const char* text) { return error && std::strstr(error, text); }
inline int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
inline float normal() { return std::normal_distribution<float>()(rng); }

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) {
    require(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)));
    require(cudaMemset(data_, kPoison, count * sizeof(T)));
    require(cudaDeviceSynchronize());  // other streams write next
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    require(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }
  T* data() { return data_; }
  std::vector<T> host() const {
    std::vector<T> host(count_);
    require(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_;
};

template <class T>
bool is_poison(const T& value) {
  unsigned char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  return std::all_of(bytes, bytes + sizeof(T), [](unsigned char byte) { return byte == kPoison; });
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <class T>
constexpr DType kDTypeOf = std::is_same_v<T, __half>          ? DType::kFloat16
                           : std::is_same_v<T, __nv_bfloat16> ? DType::kBFloat16
                                                              : DType::kFloat32;
template <class T>
constexpr double kHalfUlp = std::is_same_v<T, __half>          ? 0x1p-11
                            : std::is_same_v<T, __nv_bfloat16> ? 0x1p-8
                                                               : 0x1p-23;

// One rounding to T, and float32 arithmetic on values of order 1.
template <class T>
bool close(T got, double expected) {
  return std::abs(double(float(got)) - expected) <= 1.01 * kHalfUlp<T> * std::abs(expected) + 3e-6;
}
inline bool close_lse(float got, double expected) {
  if (std::isinf(expected)) return got == float(expected);
  return std::abs(got - expected) <= 3e-6 + 3e-7 * std::abs(expected);
}

// The state of the union of disjoint key sets: values[i] has lse[i]; base 2.
struct Merged {
  std::vector<double> value;
  double lse = -INFINITY;
};
inline Merged merge_reference(const std::vector<const float*>& values,
                              const std::vector<double>& lse, int dim) {
  Merged merged{std::vector<double>(dim, 0.0)};
  double largest = -INFINITY;
  for (double x : lse) largest = std::max(largest, x);
  if (std::isinf(largest)) return merged;
  double sum = 0.0;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    double weight = std::exp2(lse[i] - largest);
    if (weight == 0.0) continue;
    sum += weight;
    for (int d = 0; d < dim; ++d) merged.value[d] += weight * values[i][d];
  }
  for (double& x : merged.value) x /= sum;
  merged.lse = largest + std::log2(sum);
  return merged;
}

}  // namespace check
