// RoPE as the lanes of a warp share it: a lane has four neighbouring pairs of dimensions,
// d ... d + 3 and as many half a head_dim further on.
#pragma once

#include "kernels/common/four_floats.cuh"
#include "kernels/common/rotary.cuh"

namespace preflash {

inline constexpr int kLanePairs = 4;  // head_dim is a multiple of 8

// The columns of four pairs: low ... low + 3 and high ... high + 3. Units past the head_dim's last
// share its padding, which must become zeros.
struct PairColumns {
  int low;
  int high;

  __device__ __forceinline__ static PairColumns of(int unit, int head_dim) {
    int half = head_dim / 2;
    if (unit * kLanePairs < half) return {unit * kLanePairs, half + unit * kLanePairs};
    int padding = head_dim + (unit - half / kLanePairs) * 2 * kLanePairs;
    return {padding, padding + kLanePairs};
  }
};

// By the special function unit: off by 5e-7 at most.
__device__ __forceinline__ Rotation fast_rotation_by(std::uint32_t turns) {
  constexpr float kRadians = 1.4629180792671596e-9f;  // 2 pi / 2^32
  float x = static_cast<float>(static_cast<std::int32_t>(turns)) * kRadians;
  return {__cosf(x), __sinf(x)};
}

// The angles of a lane's pairs at one position.
struct LaneAngles {
  Rotation by[kLanePairs];

  // kRotationBy: rotation_by(), or fast_rotation_by()
  template <Rotation (*kRotationBy)(std::uint32_t)>
  __device__ __forceinline__ static LaneAngles at(int position, const std::uint64_t* frequency) {
    LaneAngles angles;
    CUTE_UNROLL
    for (int i = 0; i < kLanePairs; ++i) {
      angles.by[i] = kRotationBy(turns_at(position, frequency[i]));
    }
    return angles;
  }
  __device__ __forceinline__ static LaneAngles load(const Rotation* by) {
    LaneAngles angles;
    CUTE_UNROLL
    for (int i = 0; i < kLanePairs; ++i) angles.by[i] = by[i];
    return angles;
  }
  __device__ __forceinline__ void turn(const LaneAngles& step, int times = 1) {
    for (; times > 0; --times) {
      CUTE_UNROLL
      for (int i = 0; i < kLanePairs; ++i) by[i] = by[i] * step.by[i];
    }
  }
  __device__ __forceinline__ void rotate(FourFloats& low, FourFloats& high) const {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      preflash::rotate(low.pair[i].x, high.pair[i].x, by[2 * i]);
      preflash::rotate(low.pair[i].y, high.pair[i].y, by[2 * i + 1]);
    }
  }
};

// Angles that grow by the same step from row to row. By the recurrence of Chebyshev, two operations
// a step in place of a rotation's four: cos(a + d) = 2 cos(d) cos(a) - cos(a - d), and so the sine.
// Its error grows with the square of the steps: 1e-5 at most in 16 of them.
struct SteppedAngles {
  LaneAngles now;
  LaneAngles last;
  float twice_cosine[kLanePairs];

  __device__ __forceinline__ SteppedAngles(const LaneAngles& first, const Rotation* step)
      : now(first) {
    CUTE_UNROLL
    for (int i = 0; i < kLanePairs; ++i) {
      Rotation back = {step[i].cosine, -step[i].sine};
      last.by[i] = now.by[i] * back;
      twice_cosine[i] = 2.0f * back.cosine;
    }
  }
  __device__ __forceinline__ void advance() {
    CUTE_UNROLL
    for (int i = 0; i < kLanePairs; ++i) {
      Rotation next = {fmaf(twice_cosine[i], now.by[i].cosine, -last.by[i].cosine),
                       fmaf(twice_cosine[i], now.by[i].sine, -last.by[i].sine)};
      last.by[i] = now.by[i];
      now.by[i] = next;
    }
  }
};

}  // namespace preflash
