// Checks the conversions and rotations of operands stored in another form than products take,
// against double and against every byte's definition. Exits with 0, with 1 on a mismatch, with 77
// where there is no GPU.
//
//   nvcc -std=c++20 -O3 -arch=sm_90 --expt-relaxed-constexpr -Icpp/include -Icpp -I$GENERATED
//        -o convert_check tests/cpp/convert_check.cu
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numbers>
#include <vector>

#include "kernels/common/dequantize.cuh"
#include "kernels/common/rotary.cuh"

namespace {

using namespace preflash;

int num_failures = 0;

void expect(bool ok, const char* what, double a = 0.0, double b = 0.0) {
  if (!ok && ++num_failures <= 20) std::printf("FAILED: %s: %.17g, %.17g\n", what, a, b);
}

// ---- Rotations ----------------------------------------------------------------------------------

constexpr double kRotationError = 1.5e-7;

void check_rotation(std::uint32_t turns, Rotation got) {
  double angle = 2.0 * std::numbers::pi * turns * 0x1p-32;
  expect(std::abs(got.cosine - std::cos(angle)) <= kRotationError, "cosine", angle, got.cosine);
  expect(std::abs(got.sine - std::sin(angle)) <= kRotationError, "sine", angle, got.sine);
}

std::vector<std::uint32_t> some_turns() {
  std::vector<std::uint32_t> turns;
  for (std::uint64_t i = 0; i <= 1u << 20; ++i)
    turns.push_back(static_cast<std::uint32_t>(i << 12));
  for (std::uint32_t eighth = 0; eighth < 8; ++eighth) {
    for (int i = -1000; i <= 1000; ++i) turns.push_back((eighth << 29) + i);
  }
  return turns;
}

// Up to the largest positions, where only the fixed point keeps a fraction of a turn. A double's
// frequency is off by 2^-54 of itself and more, so angles agree to position * frequency * 2^-50.
void check_frequencies(const RopeOptions& rope, int head_dim) {
  RotaryFrequencies frequencies = RotaryFrequencies::make(rope, head_dim);
  const std::int32_t positions[] = {0,      1,       -1,         63,         4097,       -300,
                                    131071, 1 << 17, 1234567890, 2147483647, -2147483647};
  for (int d = 0; d < head_dim / 2; ++d) {
    long double frequency =
        std::pow(static_cast<long double>(rope.theta), -2.0L * d / head_dim) / rope.scale;
    for (std::int32_t position : positions) {
      long double angle = position * frequency;
      long double error = 4e-9L + std::abs(angle) * 0x1p-50L;
      long double got =
          turns_at(position, frequencies.of_pair[d]) * (std::numbers::pi_v<long double> * 0x1p-31L);
      long double distance = std::remainder(got - angle, 2 * std::numbers::pi_v<long double>);
      expect(std::abs(distance) <= error, "angle", position, static_cast<double>(distance));
    }
  }
}

void check_pair() {
  Rotation by = rotation_by(turns_at(100000, RotaryFrequencies::make({}, 128).of_pair[3]));
  double angle = 100000 * std::pow(1e4, -6.0 / 128);
  float low = 0.75f, high = -1.5f;
  rotate(low, high, by);
  expect(std::abs(low - (0.75 * std::cos(angle) + 1.5 * std::sin(angle))) < 1e-6, "low", low);
  expect(std::abs(high - (-1.5 * std::cos(angle) + 0.75 * std::sin(angle))) < 1e-6, "high", high);
  Rotation sum = by * rotation_by(1u << 30);  // and a quarter turn
  expect(std::abs(sum.cosine + std::sin(angle)) < 1e-6, "cosine of a sum", sum.cosine);
  expect(std::abs(sum.sine - std::cos(angle)) < 1e-6, "sine of a sum", sum.sine);
}

// ---- Widening -----------------------------------------------------------------------------------

double value_of(DType dtype, unsigned byte) {
  bool e4m3 = dtype == DType::kFloat8E4M3;
  int fraction_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, top = e4m3 ? 15 : 31;
  int exponent = (byte & 0x7f) >> fraction_bits, fraction = byte & ((1 << fraction_bits) - 1);
  double sign = byte & 0x80 ? -1.0 : 1.0;
  if (exponent == top && !e4m3) return fraction == 0 ? sign * HUGE_VAL : std::nan("");
  if (exponent == top && fraction == 7) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
}

void check_element(DType from, unsigned byte, float got, const char* what) {
  double wanted = value_of(from, byte);
  bool same = std::isnan(wanted) ? std::isnan(got)
                                 : got == wanted && std::signbit(got) == std::signbit(wanted);
  expect(same, what, wanted, got);
}

// Every byte in every place, beside others.
std::vector<std::uint32_t> some_bytes() {
  std::vector<std::uint32_t> words;
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    for (std::uint32_t step : {0u, 1u, 77u}) {
      std::uint32_t others[] = {byte, byte + step & 255, byte + 2 * step & 255,
                                byte + 3 * step & 255};
      for (int turn = 0; turn < 4; ++turn) {
        words.push_back(others[turn] | others[(turn + 1) % 4] << 8 | others[(turn + 2) % 4] << 16 |
                        others[(turn + 3) % 4] << 24);
      }
    }
  }
  return words;
}

template <DType kFrom, DType kTo>
void check_dequantized(std::uint32_t four, FourElements got, const char* what) {
  for (int i = 0; i < 2; ++i) {
    float2 pair = Pair<kTo>::to_floats(got.pair[i]);
    check_element(kFrom, four >> (16 * i) & 255, pair.x, what);
    check_element(kFrom, four >> (16 * i + 8) & 255, pair.y, what);
  }
}

// ---- Kernels ------------------------------------------------------------------------------------

void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("FAILED: CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// out[i] of each i: `kernel` with the inputs and room for the outputs on the GPU.
template <class Out, class Kernel>
std::vector<Out> run(Kernel kernel, const std::vector<std::uint32_t>& in, int outputs_each) {
  std::vector<Out> out(in.size() * outputs_each);
  std::uint32_t* device_in = nullptr;
  Out* device_out = nullptr;
  require(cudaMalloc(&device_in, in.size() * sizeof(in[0])));
  require(cudaMalloc(&device_out, out.size() * sizeof(Out)));
  require(cudaMemcpy(device_in, in.data(), in.size() * sizeof(in[0]), cudaMemcpyHostToDevice));
  int count = static_cast<int>(in.size());
  kernel<<<(count + 127) / 128, 128>>>(device_in, device_out, count);
  require(cudaMemcpy(out.data(), device_out, out.size() * sizeof(Out), cudaMemcpyDeviceToHost));
  require(cudaFree(device_in));
  require(cudaFree(device_out));
  return out;
}

__global__ void rotations(const std::uint32_t* turns, Rotation* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) out[i] = rotation_by(turns[i]);
}

template <DType kFrom, DType kTo>
__global__ void dequantized(const std::uint32_t* bytes, FourElements* out, int count) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  out[2 * i] = dequantize<kFrom, kTo>(bytes[i]);
  out[2 * i + 1] = dequantize_by_bits<kFrom, kTo>(bytes[i]);
}

template <DType kFrom, DType kTo>
void check_dequantization() {
  std::vector<std::uint32_t> words = some_bytes();
  std::vector<FourElements> got = run<FourElements>(dequantized<kFrom, kTo>, words, 2);
  for (std::size_t i = 0; i < words.size(); ++i) {
    check_dequantized<kFrom, kTo>(words[i], got[2 * i], "dequantize");
    check_dequantized<kFrom, kTo>(words[i], got[2 * i + 1], "dequantize_by_bits");
  }
}

void check_rotations() {
  std::vector<std::uint32_t> turns = some_turns();
  std::vector<Rotation> got = run<Rotation>(rotations, turns, 1);
  for (std::size_t i = 0; i < turns.size(); ++i) {
    check_rotation(turns[i], got[i]);
    // The host has the same bits, because no product is fused that is not written as such.
    Rotation wanted = rotation_by(turns[i]);
    expect(got[i].cosine == wanted.cosine && got[i].sine == wanted.sine, "the same bits",
           wanted.sine, got[i].sine);
  }
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;
  check_rotations();
  for (int head_dim : {8, 24, 64, 72, 128, 192, 256, 512}) {
    check_frequencies({}, head_dim);
    check_frequencies({.scale = 8.0, .theta = 5e5}, head_dim);
    check_frequencies({.scale = 0.03, .theta = 1e6}, head_dim);
    check_frequencies({.scale = -0.7, .theta = 0.5}, head_dim);
  }
  check_pair();
  check_dequantization<DType::kFloat8E4M3, DType::kFloat16>();
  check_dequantization<DType::kFloat8E4M3, DType::kBFloat16>();
  check_dequantization<DType::kFloat8E5M2, DType::kFloat16>();
  check_dequantization<DType::kFloat8E5M2, DType::kBFloat16>();
  std::printf("%d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}
