// Rows between storage and float32 in portable integer arithmetic. Included inside the namespace of
// the generic file.

inline float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t rest = half & 0x7fff;
  if (rest >= 0x7c00) return float_from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Subnormals become floats as the integers that they are: where a thread takes subnormal
  // floats for zero (torch.set_flush_denormal), shifted bits would be lost.
  if (rest < 0x400) return float_from_bits(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
  return float_from_bits(sign | ((rest << 13) + (uint32_t{112} << 23)));
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

inline float widen_bfloat(uint16_t bfloat) {
  return float_from_bits(static_cast<uint32_t>(bfloat) << 16);
}

inline float widen_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  const uint32_t rest = code & 0x7f;
  if (rest == kNanE4M3) return float_from_bits(sign | 0x7fc00000);
  if (rest < 8) return float_from_bits(sign | bits_of(static_cast<float>(rest) * 0x1p-9f));
  return float_from_bits(sign | ((rest << 20) + (uint32_t{120} << 23)));
}

// The upper half of a float16.
inline float widen_e5m2(uint8_t code) { return widen_half(static_cast<uint16_t>(code << 8)); }

inline float as_it_is(float x) { return x; }

// The function is a template argument, so that it is inlined.
template <class Stored, float (*widen_one)(Stored)>
inline void widen_row(const void* source, float* target, int n) {
  const auto* stored = static_cast<const Stored*>(source);
  for (int i = 0; i < n; ++i) target[i] = widen_one(stored[i]);
}

void widen(DType dtype, const void* source, float* target, int n) {
  switch (dtype) {
    case DType::kFloat32: return widen_row<float, as_it_is>(source, target, n);
    case DType::kFloat16: return widen_row<uint16_t, widen_half>(source, target, n);
    case DType::kBFloat16: return widen_row<uint16_t, widen_bfloat>(source, target, n);
    case DType::kFloat8E4M3: return widen_row<uint8_t, widen_e4m3>(source, target, n);
    case DType::kFloat8E5M2: return widen_row<uint8_t, widen_e5m2>(source, target, n);
  }
}

template <class Stored, Stored (*narrow_one)(float)>
inline void narrow_row(const float* source, float scale, void* target, int n) {
  auto* stored = static_cast<Stored*>(target);
  for (int i = 0; i < n; ++i) stored[i] = narrow_one(source[i] * scale);
}

void narrow(DType dtype, const float* source, float scale, void* target, int n) {
  switch (dtype) {
    case DType::kFloat32: return narrow_row<float, as_it_is>(source, scale, target, n);
    case DType::kFloat16: return narrow_row<uint16_t, narrow_half>(source, scale, target, n);
    case DType::kBFloat16: return narrow_row<uint16_t, narrow_bfloat>(source, scale, target, n);
    case DType::kFloat8E4M3: return narrow_row<uint8_t, narrow_e4m3>(source, scale, target, n);
    case DType::kFloat8E5M2: return;  // no output has it
  }
}
