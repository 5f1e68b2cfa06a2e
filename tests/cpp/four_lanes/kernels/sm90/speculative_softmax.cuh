// Stands in for the header of this name where eight_bit_softmax.cuh is compiled for the host: the
// four lanes of a row are threads, and these are two rows.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <limits>

#define CUTE_UNROLL
#define __device__
#define __forceinline__ inline
#define CUTE_DEVICE inline

inline constexpr int kLanes = 4;
inline thread_local int lane;
inline std::barrier<> lanes_meet(kLanes);
inline float of_lanes[kLanes];

inline float max_of_lanes(float x) {
  of_lanes[lane] = x;
  lanes_meet.arrive_and_wait();
  const float found = *std::max_element(of_lanes, of_lanes + kLanes);
  lanes_meet.arrive_and_wait();
  return found;
}
inline float __fmul_rn(float x, float y) { return x * y; }
inline bool __any_sync(unsigned, bool any) { return max_of_lanes(any) > 0.0f; }

namespace preflash {

inline constexpr float kLog2E = 1.4426950408889634f;
enum class DType { kFloat8E4M3 };
enum class LseForm { kLogSumExp, kMaxAndSum };
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }

inline float rounded_to_e4m3(float x) {
  if (!(x > 0.0f)) return 0.0f;
  const float unit = std::ldexp(1.0f, std::max(std::ilogb(x), -6) - 3);
  return std::min(std::nearbyint(x / unit) * unit, 448.0f);
}

namespace sm90 {

struct NoShift {
  static float add_to(int, float x) { return x; }
};
inline constexpr int kLaneKeys = 32;  // of a lane's 128 keys a tile
struct LaneTile {
  float row[2][kLaneKeys];
};

// A row's O, as one number.
struct LaneOut {
  double row[2] = {};
  double& operator()(int r, int) { return row[r]; }
};
template <class Visit>
void for_each_element(LaneOut& out, const Visit& visit) {
  for (int r = 0; r < 2; ++r) {
    float x = static_cast<float>(out.row[r]);
    visit(r, 0, x);
    out.row[r] = x;
  }
}

struct SpeculativeSoftmax {
  static constexpr int kRows = 2;
  static constexpr int exponent_of(DType) { return 4; }
  static constexpr float max_sum(LseForm form, DType) {
    return form == LseForm::kMaxAndSum ? 16.0f : 448.0f;
  }
  static float quad_max(float x) { return max_of_lanes(x); }
  static float scaled_reference(float reference, float scale) {
    return reference == -INFINITY ? 0.0f : reference * scale;
  }
  static float change_of_reference(float from, float to, float scale) {
    if (from == -INFINITY) return 0.0f;
    return exp2_approx(scaled_reference(from, scale) - scaled_reference(to, scale));
  }
  static void thread_maxima(const LaneTile& scores, float (&result)[kRows]) {
    for (int r = 0; r < kRows; ++r) {
      result[r] = *std::max_element(scores.row[r], scores.row[r] + kLaneKeys);
    }
  }
  static void maxima(const LaneTile& scores, NoShift, float (&result)[kRows]) {
    thread_maxima(scores, result);
    for (float& of_row : result) of_row = quad_max(of_row);
  }

  float reference[kRows] = {-INFINITY, -INFINITY};
  float sum[kRows] = {};

  template <class Segment>
  void make_first(const LaneTile& scores, NoShift shift, LaneTile& p, const Segment& segment) {
    exponentiate(scores, shift, p, sum, segment.logits.scale_log2);
  }

 protected:
  void exponentiate(const LaneTile& scores, NoShift, LaneTile& p, float (&tile_sum)[kRows],
                    float scale) const {
    for (int r = 0; r < kRows; ++r) {
      const float offset = scaled_reference(reference[r], scale) - 4;
      tile_sum[r] = 0.0f;
      for (int c = 0; c < kLaneKeys; ++c) {
        const float weight = exp2_approx(std::fma(scores.row[r][c], scale, -offset));
        tile_sum[r] += weight;
        p.row[r][c] = rounded_to_e4m3(weight);
      }
    }
  }
};

}  // namespace sm90
}  // namespace preflash
