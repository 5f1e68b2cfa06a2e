// The CPU kernel, written once over the vector type of simd_*.h. Each kernel_<isa>.cpp includes
// that header and this file inside its own namespace; see isa.h for why nothing here is shared.
//
//   scores   s[key][row] = dot(q[row], k[key])       kKeyBlock x vectors register block
//   softmax  s = 2^(logit - reference), online         one query row per lane
//   values   o[row][:] = o * rescale + s^T * v        kOutRows x kOutVecs register block

// 2^x for x <= 0 and the roundings above it; below -127 it is exactly 0, NaN stays NaN.
// x = n + r with |r| <= 1/2; the polynomial is a minimax fit of 2^r with relative error 9.2e-8.
inline Vec exp2(Vec x) {
  const Vec shift =
      broadcast(12582912.0f + 127.0f);  // 1.5 * 2^23: rounds to an integer in low bits
  x = max(broadcast(-127.0f), x);
  Vec t = add(x, shift);
  Vec r = sub(x, sub(t, shift));
  Vec p = broadcast(1.32647273e-3f);
  p = fma(p, r, broadcast(9.67151279e-3f));
  p = fma(p, r, broadcast(5.55073374e-2f));
  p = fma(p, r, broadcast(2.40222421e-1f));
  p = fma(p, r, broadcast(6.93146978e-1f));
  p = fma(p, r, broadcast(1.0f));
  return mul(p, power_from_low_bits(t));
}

// Relative error about 2e-7. Above 0.6 through 2^x, below by an odd minimax polynomial.
inline Vec tanh(Vec x) {
  Vec a = abs(x);
  Vec z = mul(x, x);
  Vec p = broadcast(-5.8943958e-3f);
  p = fma(p, z, broadcast(2.07953683e-2f));
  p = fma(p, z, broadcast(-5.37836676e-2f));
  p = fma(p, z, broadcast(1.33319224e-1f));
  p = fma(p, z, broadcast(-3.33332979e-1f));
  Vec small = fma(mul(p, z), x, x);
  // 2 log2(e) |x|, bounded where tanh has long rounded to 1.
  Vec e = exp2(min(broadcast(60.0f), mul(a, broadcast(2.88539008f))));
  Vec large = sub(broadcast(1.0f), div(broadcast(2.0f), add(e, broadcast(1.0f))));
  return where_less(a, broadcast(0.6f), small, with_sign_of(large, x));
}

struct FloatUnits {
  static Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }
};
#if defined(PREFLASH_BF16_PAIRS)
struct BFloat16Pairs {
  static Vec multiply_add(Vec a, Vec b, Vec c) { return fma_bf16_pairs(a, b, c); }
};
#endif

// ---- scores

template <class Units, int kKeys, int kVecs>
inline void score_block(const PanelStep& step, int key) {
  constexpr int kLd = kVecs * kLanes;
  const float* k = step.k + key * step.ld_k;
  const float* q = step.q;
  Vec acc[kKeys][kVecs];
  for (int i = 0; i < kKeys; ++i) {
    for (int v = 0; v < kVecs; ++v) acc[i][v] = broadcast(0.0f);
  }
  for (int unit = 0; unit < step.units; ++unit, q += kLd, ++k) {
    Vec rows[kVecs];
    for (int v = 0; v < kVecs; ++v) rows[v] = load(q + v * kLanes);
    for (int i = 0; i < kKeys; ++i) {
      Vec element = broadcast(k[i * step.ld_k]);
      for (int v = 0; v < kVecs; ++v) acc[i][v] = Units::multiply_add(element, rows[v], acc[i][v]);
    }
  }
  float* scores = step.scores + key * kLd;
  for (int i = 0; i < kKeys; ++i) {
    for (int v = 0; v < kVecs; ++v) store(scores + i * kLd + v * kLanes, acc[i][v]);
  }
}

template <class Units, int kVecs>
inline void score_panel(const PanelStep& step) {
  int key = step.key_begin;
  for (; key + kKeyBlock <= step.key_end; key += kKeyBlock) {
    score_block<Units, kKeyBlock, kVecs>(step, key);
  }
  for (; key + 4 <= step.key_end; key += 4) score_block<Units, 4, kVecs>(step, key);
  for (; key < step.key_end; ++key) score_block<Units, 1, kVecs>(step, key);
}

// A few rows would leave most lanes idle: here the lanes run along the head dimension instead.
template <class Units, int kKeys>
inline void score_few_block(const PanelStep& step, int key) {
  for (int row = 0; row < step.rows; ++row) {
    const float* q = step.q + row * step.ld_k;
    const float* k = step.k + key * step.ld_k;
    Vec acc[kKeys];
    for (int i = 0; i < kKeys; ++i) acc[i] = broadcast(0.0f);
    for (int unit = 0; unit < step.units; unit += kLanes) {
      Vec rows = load(q + unit);
      for (int i = 0; i < kKeys; ++i) {
        acc[i] = Units::multiply_add(load(k + i * step.ld_k + unit), rows, acc[i]);
      }
    }
    for (int i = 0; i < kKeys; ++i) {
      step.scores[(key + i) * step.ld + row] = sum_lanes(acc[i]);
    }
  }
}

template <class Units>
inline void score_few_rows(const PanelStep& step) {
  // Lanes without a row take part in the softmax: give them something finite.
  for (int i = step.key_begin * step.ld; i < step.key_end * step.ld; i += kLanes) {
    store(step.scores + i, broadcast(0.0f));
  }
  int key = step.key_begin;
  for (; key + 4 <= step.key_end; key += 4) score_few_block<Units, 4>(step, key);
  for (; key < step.key_end; ++key) score_few_block<Units, 1>(step, key);
}

// ---- softmax

template <class Function>
inline void for_each_score(const PanelStep& step, Function function) {
  for (int i = step.key_begin * step.ld; i < step.key_end * step.ld; i += kLanes) {
    store(step.scores + i, function(load(step.scores + i)));
  }
}

// Turns dots into scores, which lack only a positive factor.
inline void transform_logits(const PanelStep& step) {
  const LogitRule& rule = step.logits;
  if (rule.cap > 0.0f) {
    Vec inner = broadcast(rule.scale_in_cap), cap = broadcast(rule.cap);
    for_each_score(step, [=](Vec s) { return mul(cap, tanh(mul(s, inner))); });
  } else if (rule.scale != 1.0f) {
    Vec scale = broadcast(rule.scale);
    for_each_score(step, [=](Vec s) { return mul(s, scale); });
  }
}

// Distances are exact up to 2^24: the bias is rounded once, with the score.
inline void add_bias(const PanelStep& step) {
  for (int row = 0; row < step.ld; row += kLanes) {
    const Vec slope = load(step.bias.slope + row), distance = load(step.bias.distance + row);
    for (int key = step.key_begin; key < step.key_end; ++key) {
      float* scores = step.scores + key * step.ld + row;
      Vec from_reference = add(distance, broadcast(static_cast<float>(key)));
      store(scores, fma(slope, from_reference, load(scores)));
    }
  }
}

inline void mask_scores(const PanelStep& step) {
  const Vec masked = broadcast(-__builtin_inff());
  for (int key = step.key_begin; key < step.key_end; ++key) {
    const uint32_t* words = step.keep + (key / kMaskWordKeys) * step.ld;
    const uint32_t bit = uint32_t{1} << (key % kMaskWordKeys);
    float* scores = step.scores + key * step.ld;
    for (int row = 0; row < step.ld; row += kLanes) {
      Vec s = load(scores + row);
      store(scores + row, where_bit(load_bits(words + row), bit, s, masked));
    }
  }
}

// The maxima of one vector of rows, and their products with the factor.
struct RowMaxima {
  Vec raw;      // -inf: no key yet
  Vec product;  // rounded

  RowMaxima(Vec raw, Vec factor) : raw(raw), product(mul(raw, factor)) {}
  // A row without a key so far has maximum -inf; subtracting 0 instead leaves its weights 0.
  Vec reference() const {
    return where_less(broadcast(-__builtin_inff()), raw, product, broadcast(0.0f));
  }
  // The float below kHugeLogit: the power of two less half an ulp of it.
  static Vec below_huge() { return broadcast(kHugeLogit * 0x1.fffffep-1f); }
  bool any_huge() const { return any_less(below_huge(), abs(reference())); }
  Vec where_huge(Vec then, Vec otherwise) const {
    return where_less(below_huge(), abs(reference()), then, otherwise);
  }
};

// Replaces the scores of one vector of rows by weights and returns their sums.
template <class Exponent>
inline Vec weigh(const PanelStep& step, float* scores, Exponent exponent) {
  Vec sum = broadcast(0.0f);
  for (int key = step.key_begin; key < step.key_end; ++key) {
    Vec weight = exp2(exponent(load(scores + key * step.ld)));
    store(scores + key * step.ld, weight);
    sum = add(sum, weight);
  }
  return sum;
}

// Returns the factor that turns weights relative to the old references into weights relative to the
// new ones, for rows of which some may be huge before or after.
inline Vec rescale_huge(const RowMaxima& old, const RowMaxima& now, Vec factor) {
  const Vec zero = broadcast(0.0f);
  Vec neither = sub(old.product, now.reference());
  Vec both = mul(sub(old.raw, now.raw), factor);
  Vec only_old = exact_fma(old.raw, factor, sub(zero, now.reference()));
  Vec only_now = sub(zero, exact_fma(now.raw, factor, sub(zero, old.product)));
  return exp2(now.where_huge(old.where_huge(both, only_now), old.where_huge(only_old, neither)));
}

// Rows that are not huge get the same bits as in a vector without huge rows.
[[gnu::noinline]] Vec weigh_huge(const PanelStep& step, float* scores, const RowMaxima& now) {
  const Vec factor = broadcast(step.logits.factor);
  const Vec minus = sub(broadcast(0.0f), now.reference());
  return weigh(step, scores, [=](Vec s) {
    return now.where_huge(mul(sub(s, now.raw), factor), fma(s, factor, minus));
  });
}

// One vector of rows: new maximum, then weights 2^(logit - reference) in place of the scores.
inline void softmax_rows(const PanelStep& step, int row) {
  const Vec factor = broadcast(step.logits.factor);
  float* scores = step.scores + row;
  const RowMaxima old(load(step.row_max + row), factor);
  Vec top = old.raw;
  for (int key = step.key_begin; key < step.key_end; ++key) {
    top = max(top, load(scores + key * step.ld));
  }
  const RowMaxima now(top, factor);
  Vec rescale, sum;
  if (old.any_huge() || now.any_huge()) {
    rescale = rescale_huge(old, now, factor);
    sum = weigh_huge(step, scores, now);
  } else {
    const Vec minus = sub(broadcast(0.0f), now.reference());
    rescale = exp2(sub(old.product, now.reference()));
    sum = weigh(step, scores, [=](Vec s) { return fma(s, factor, minus); });
  }
  store(step.row_max + row, now.raw);
  store(step.row_sum + row, fma(load(step.row_sum + row), rescale, sum));
  store(step.rescale + row, rescale);
}

// ---- values

template <int kRows, int kVecs>
inline void value_block(const PanelStep& step, int row, int column) {
  const float* v = step.v + step.key_begin * step.ld_v + column;
  const float* weights = step.scores + step.key_begin * step.ld + row;
  float* o = step.o + row * step.ld_v + column;
  Vec acc[kRows][kVecs];
  for (int i = 0; i < kRows; ++i) {
    Vec rescale = broadcast(step.rescale[row + i]);
    for (int c = 0; c < kVecs; ++c) {
      acc[i][c] = mul(load(o + i * step.ld_v + c * kLanes), rescale);
    }
  }
  for (int key = step.key_begin; key < step.key_end; ++key, v += step.ld_v, weights += step.ld) {
    Vec value[kVecs];
    for (int c = 0; c < kVecs; ++c) value[c] = load(v + c * kLanes);
    for (int i = 0; i < kRows; ++i) {
      Vec weight = broadcast(weights[i]);
      for (int c = 0; c < kVecs; ++c) acc[i][c] = fma(weight, value[c], acc[i][c]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int c = 0; c < kVecs; ++c) store(o + i * step.ld_v + c * kLanes, acc[i][c]);
  }
}

template <int kVecs>
inline void value_columns(const PanelStep& step, int column) {
  int row = 0;
  for (; row + kOutRows <= step.rows; row += kOutRows) {
    value_block<kOutRows, kVecs>(step, row, column);
  }
  for (; row + 2 <= step.rows; row += 2) value_block<2, kVecs>(step, row, column);
  if (row < step.rows) value_block<1, kVecs>(step, row, column);
}

// Column blocks outside, rows inside: the block's values stay in the first cache for all rows.
inline void value_panel(const PanelStep& step) {
  int left = step.vo_vecs;
  int column = 0;
  for (; left >= kOutVecs && left != kOutVecs + 1; left -= kOutVecs, column += kOutVecs * kLanes) {
    value_columns<kOutVecs>(step, column);
  }
  for (; left >= 2; left -= 2, column += 2 * kLanes) value_columns<2>(step, column);
  if (left == 1) value_columns<1>(step, column);
}

// ---- the step

// True if a row comes within the margin of its maximum so far. A NaN does not count, nor does a row
// that has no key, here or before.
inline bool has_weight(const PanelStep& step) {
  for (int row = 0; row < step.ld; row += kLanes) {
    Vec top = broadcast(-__builtin_inff());
    for (int key = step.key_begin; key < step.key_end; ++key) {
      top = max(top, load(step.scores + key * step.ld + row));
    }
    float bits[kLanes];
    store(bits, mul(sub(top, load(step.row_max + row)), broadcast(step.logits.factor)));
    for (int i = 0; i < kLanes && row + i < step.rows; ++i) {
      if (bits[i] >= step.margin) return true;
    }
  }
  return false;
}

template <class Units>
inline void attend_panel(const PanelStep& step) {
  if (step.few) {
    score_few_rows<Units>(step);
  } else if (step.ld == kLanes) {
    score_panel<Units, 1>(step);
  } else {
    score_panel<Units, kRowVecs>(step);
  }
  transform_logits(step);
  if (step.bias.slope != nullptr) add_bias(step);
  if (step.keep != nullptr) mask_scores(step);
  if (step.skips && !has_weight(step)) return;
  for (int row = 0; row < step.ld; row += kLanes) softmax_rows(step, row);
  value_panel(step);
}

void attend(const PanelStep& step) { attend_panel<FloatUnits>(step); }
#if defined(PREFLASH_BF16_PAIRS)
void attend_bf16_pairs(const PanelStep& step) { attend_panel<BFloat16Pairs>(step); }
#endif

void accumulate(float weight, const float* source, float* target, int n) {
  for (int i = 0; i < n; ++i) target[i] += weight * source[i];
}

void rotate(float* __restrict row, int half, const Angles& a, const Angles& b) {
  for (int i = 0; i < half; ++i) {
    const float cosine = a.cosines[i] * b.cosines[i] - a.sines[i] * b.sines[i];
    const float sine = a.sines[i] * b.cosines[i] + a.cosines[i] * b.sines[i];
    const float x = row[i], y = row[half + i];
    row[i] = x * cosine - y * sine;
    row[half + i] = y * cosine + x * sine;
  }
}
