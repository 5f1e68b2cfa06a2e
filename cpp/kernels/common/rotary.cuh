// RoPE's rotations. A pair of dimensions turns by an angle that grows with position; the loaders
// determine the layout and dtype of the pairs.
//
// Angles are fractions of a turn in fixed point: a frequency has 64 bits, and its product with a
// position modulo 2^64 drops whole turns, which mean nothing, and no bit of the rest. So an angle
// is as exact at position 2^31 as at 1, without a double. Everything here also runs on the host,
// where it is checked against double.
//
// NOTE: every fused product is written out. Which of two products of a sum the compiler fuses is
// its choice otherwise, and differs from kernel to kernel; rows have the same bits in all of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "preflash/options.h"

namespace preflash {

inline constexpr int kMaxRotaryPairs = 256;  // of head_dim 512

// Turns for each position, times 2^64, without whole turns.
struct RotaryFrequencies {
  std::uint64_t of_pair[kMaxRotaryPairs] = {};

  // Returns the frequencies for head_dim elements: pair d is elements d and d + head_dim / 2.
  static RotaryFrequencies make(const RopeOptions& rope, int head_dim) {
    constexpr double kRadiansPerTurn = 6.283185307179586476925;
    RotaryFrequencies frequencies;
    for (int d = 0; d < head_dim / 2; ++d) {
      double turns = std::pow(rope.theta, -2.0 * d / head_dim) / rope.scale / kRadiansPerTurn;
      double fraction = turns - std::floor(turns);
      // A tiny negative number's fraction rounds to a whole turn, which no integer holds.
      frequencies.of_pair[d] =
          fraction < 1.0 ? static_cast<std::uint64_t>(std::ldexp(fraction, 64)) : 0;
    }
    return frequencies;
  }
};

// Caches them across launches, since a power for each pair of dimensions takes as long as a launch.
inline const RotaryFrequencies& rotary_frequencies(const RopeOptions& rope, int head_dim) {
  struct Kept {
    RopeOptions rope;
    int head_dim = 0;
    RotaryFrequencies frequencies;
  };
  thread_local Kept kept;
  if (kept.head_dim != head_dim || !(kept.rope == rope)) {
    kept = {rope, head_dim, RotaryFrequencies::make(rope, head_dim)};
  }
  return kept.frequencies;
}

// The angle at a position, which may be negative, in 2^-32 turns.
PREFLASH_HD constexpr std::uint32_t turns_at(std::int32_t position, std::uint64_t frequency) {
  auto wrapped = static_cast<std::uint64_t>(std::int64_t{position});
  return static_cast<std::uint32_t>((wrapped * frequency) >> 32);
}

// a b + c d, of which the first product is fused.
PREFLASH_HD inline float sum_of_products(float a, float b, float c, float d) {
  return std::fmaf(a, b, c * d);
}

// Cosine and sine of an angle.
struct Rotation {
  float cosine;
  float sine;

  // The rotation by both angles.
  PREFLASH_HD friend Rotation operator*(Rotation a, Rotation b) {
    return {sum_of_products(a.cosine, b.cosine, -a.sine, b.sine),
            sum_of_products(a.sine, b.cosine, a.cosine, b.sine)};
  }
};

// Off by 1.5e-7 at most. Angle = quarter turns + x, |x| <= 1/8 turn; minimax polynomials in x,
// fitted with weights that equalise the error: 2e-9 for the sine, 3e-8 for the cosine.
PREFLASH_HD inline Rotation rotation_by(std::uint32_t turns) {
  constexpr float kRadians = 1.4629180792671596e-9f;  // 2 pi / 2^32
  std::uint32_t quarters = (turns + (1u << 29)) >> 30;
  float x = static_cast<float>(static_cast<std::int32_t>(turns - (quarters << 30))) * kRadians;
  float x2 = x * x;
  float sine = std::fmaf(std::fmaf(-1.9495567e-4f, x2, 8.3319781e-3f), x2, -1.6666651e-1f);
  sine = std::fmaf(sine * x2, x, x);
  float cosine = std::fmaf(std::fmaf(-1.3597765e-3f, x2, 4.1656290e-2f), x2, -4.9999895e-1f);
  cosine = std::fmaf(cosine, x2, 1.0f);
  Rotation rotation = quarters & 1 ? Rotation{sine, cosine} : Rotation{cosine, sine};
  if ((quarters + 1) & 2) rotation.cosine = -rotation.cosine;
  if (quarters & 2) rotation.sine = -rotation.sine;
  return rotation;
}

// Turns a pair of elements, d and d + head_dim / 2.
PREFLASH_HD inline void rotate(float& low, float& high, Rotation by) {
  float turned = sum_of_products(low, by.cosine, -high, by.sine);
  high = sum_of_products(high, by.cosine, low, by.sine);
  low = turned;
}

}  // namespace preflash
