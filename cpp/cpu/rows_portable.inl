// Rows between storage and float32 in portable integer arithmetic. Included inside the namespace of
// the generic file.

inline float float_from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7fff;
  if (rest >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Read as a float the bits are 2^112 times too small; the product is exact, subnormals included.
  return float_from_bits(sign | bits_of(float_from_bits(rest << 13) * 0x1p112f));
}

inline uint16_t narrow_half(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  const uint32_t rest = bits_of(x) & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65536 or more
  if (rest < 0x38800000) {
    // Subnormal or zero: adding 1/2 leaves the multiple of 2^-24, rounded to even, in the low bits.
    return static_cast<uint16_t>(sign | (bits_of(float_from_bits(rest) + 0.5f) - bits_of(0.5f)));
  }
  const uint32_t rounded = rest + 0xfff + (rest >> 13 & 1);
  return static_cast<uint16_t>(sign | (rounded - (uint32_t{112} << 23)) >> 13);
}

inline uint16_t narrow_bfloat(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void widen(DType dtype, const void* source, float* target, int n) {
  const auto* half = static_cast<const uint16_t*>(source);
  if (dtype == DType::kFloat32) {
    __builtin_memcpy(target, source, static_cast<size_t>(n) * sizeof(float));
  } else if (dtype == DType::kFloat16) {
    for (int i = 0; i < n; ++i) target[i] = widen_half(half[i]);
  } else {
    for (int i = 0; i < n; ++i) target[i] = float_from_bits(static_cast<uint32_t>(half[i]) << 16);
  }
}

void narrow(DType dtype, const float* source, float scale, void* target, int n) {
  auto* half = static_cast<uint16_t*>(target);
  for (int i = 0; i < n; ++i) {
    const float x = source[i] * scale;
    if (dtype == DType::kFloat32) {
      static_cast<float*>(target)[i] = x;
    } else {
      half[i] = dtype == DType::kFloat16 ? narrow_half(x) : narrow_bfloat(x);
    }
  }
}
