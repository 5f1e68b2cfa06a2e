// RoPE: where the angles come from. A position is an origin plus an offset. Offsets are the same
// from every origin, so that their cosines and sines are made once for a launch; a tile makes those
// of its origins, and a row's angle is the sum of the two.
//
// Frequencies and their products with positions are doubles, and so are the sines: an angle
// of 2^17 radians in float32 would be off by 2^-8.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/isa.h"
#include "preflash/options.h"

namespace preflash::cpu {

class RotaryTable {
 public:
  RotaryTable(const RopeOptions& rope, int head_dim, int num_offsets)
      : half_(head_dim / 2),
        num_offsets_(num_offsets),
        frequencies_(half_),
        cosines_(static_cast<std::size_t>(num_offsets) * half_),
        sines_(cosines_.size()) {
    for (int i = 0; i < half_; ++i) {
      frequencies_[i] = std::pow(rope.theta, -2.0 * i / head_dim) / rope.scale;
      // One step after the other, in double: hundreds of them are off by 1e-13, and a sine costs
      // ten times as much.
      const double step_cosine = std::cos(frequencies_[i]), step_sine = std::sin(frequencies_[i]);
      double cosine = 1.0, sine = 0.0;
      for (int offset = 0; offset < num_offsets; ++offset) {
        const std::size_t place = static_cast<std::size_t>(offset) * half_ + i;
        cosines_[place] = static_cast<float>(cosine);
        sines_[place] = static_cast<float>(sine);
        const double next = cosine * step_cosine - sine * step_sine;
        sine = sine * step_cosine + cosine * step_sine;
        cosine = next;
      }
    }
  }

  int half() const { return half_; }

  Angles offset(int offset) const {
    const std::size_t place = static_cast<std::size_t>(offset) * half_;
    return {.cosines = cosines_.data() + place, .sines = sines_.data() + place};
  }

  // Returns the origin of a position, which may be negative: a row's bits depend on its position
  // alone, not on the tile that it is in.
  std::int64_t origin_of(std::int64_t position) const {
    const std::int64_t offset = position % num_offsets_;
    return position - (offset < 0 ? offset + num_offsets_ : offset);
  }

  // The angles of a position, which may be negative, written to angles[2 * half()].
  Angles origin(std::int64_t position, float* angles) const {
    for (int i = 0; i < half_; ++i) {
      const double angle = static_cast<double>(position) * frequencies_[i];
      angles[i] = static_cast<float>(std::cos(angle));
      angles[half_ + i] = static_cast<float>(std::sin(angle));
    }
    return {.cosines = angles, .sines = angles + half_};
  }

 private:
  const int half_;
  const int num_offsets_;
  std::vector<double> frequencies_;  // [half], radians per position
  std::vector<float> cosines_;       // [num_offsets][half]
  std::vector<float> sines_;         // [num_offsets][half]
};

}  // namespace preflash::cpu
