// ALiBi (Press, Smith and Lewis, arXiv 2108.12409): slope * (key - row) on top of each logit.
#pragma once

#include <cmath>

#include "preflash/types.h"

namespace preflash {

// The slope of a query head, in natural-log units: for n heads, n the largest power of two in
// num_heads, 2^(-8 / n) to the power 1, 2, ..., n; for the rest the odd powers of 2^(-4 / n).
PREFLASH_HD inline float alibi_slope(int head, int num_heads) {
  int n = 1;
  float inverse = 1.0f;  // 1 / n, exactly
  for (; 2 * n <= num_heads; n *= 2) inverse *= 0.5f;
  float power = head < n ? -8.0f * (head + 1) : -4.0f * (2 * (head - n) + 1);
  return exp2f(power * inverse);
}

}  // namespace preflash
