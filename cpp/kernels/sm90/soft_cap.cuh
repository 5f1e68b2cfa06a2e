// The soft cap c * tanh(logit / c) of raw dot products s, as the softmax takes it: x = tanh(y),
// y = s * sm_scale / c, of which the logit is c * x.
//
// tanh.approx.f32 takes one operation of the unit that the exponentials use, and its relative error
// is 2^-11. PREFLASH_SOFT_CAP=exact, and launches that return the row maxima themselves, take
// float32's accuracy for up to three times the time
// (docs/dev/experiments/fa3-softmax-and-options.md).
#pragma once

#include <cmath>
#include <cstdlib>
#include <string_view>

#include "kernels/common/logits.cuh"
#include "preflash/params.h"

namespace preflash::sm90 {

enum class CapForm : std::uint8_t { kNone, kHardware, kExact };

struct SoftCap {
  // The reference of a row in base 2, where P is bfloat16 and the cap at most kLargestBounded: P is
  // then between 2^-89 and 2^57, and values of V up to 2^50 do not overflow.
  static constexpr float kReference = 16.0f;
  static constexpr float kLargestBounded = 50.0f;

  float y_per_s;    // sm_scale / c
  float reference;  // of every row, in units of x; -inf: its maximum so far
  CapForm form;

  __host__ __device__ bool is_bounded() const { return reference != -INFINITY; }

  // Returns nullptr, or what is wrong with PREFLASH_SOFT_CAP.
  const char* set(const ForwardSegment& segment, DType p_dtype, float scale_log2) {
    const char* asked = std::getenv("PREFLASH_SOFT_CAP");
    const std::string_view value = asked == nullptr ? "hardware" : asked;
    if (value != "hardware" && value != "exact") {
      return "PREFLASH_SOFT_CAP is neither hardware nor exact";
    }
    const bool exact = value == "exact" || segment.lse.form == LseForm::kMaxAndSum;
    const bool caps = segment.soft_cap > 0.0f;
    form = !caps ? CapForm::kNone : exact ? CapForm::kExact : CapForm::kHardware;
    y_per_s = caps ? segment.sm_scale / segment.soft_cap : 0.0f;
    const bool bounded = form == CapForm::kHardware && p_dtype == DType::kBFloat16 &&
                         segment.soft_cap <= kLargestBounded;
    reference = bounded ? kReference / scale_log2 : -INFINITY;
    return nullptr;
  }
  // Caps a whole tile, in place.
  CUTE_DEVICE void apply(auto&& scores, const LogitsParams& logits) const {
    if (form == CapForm::kHardware) {
      apply_to_half<0>(scores);
      apply_to_half<1>(scores);
    } else if (form == CapForm::kExact) {
      transform_logits<Logits::kSoftCap>(scores, logits);
    }
  }
  // Caps the first or the second half of the columns, in the hardware's form.
  template <int kHalf, class Scores>
  CUTE_DEVICE void apply_to_half(Scores&& scores) const {
    constexpr int kScores = decltype(cute::size(scores))::value / 2;
    CUTE_UNROLL
    for (int i = kHalf * kScores; i < (kHalf + 1) * kScores; ++i) {
      scores(i) = tanh_approx(scores(i) * y_per_s);
    }
  }
};

}  // namespace preflash::sm90
