// One element of 8 bits in portable integer arithmetic. Included inside the namespaces of all files
// of instruction sets, in front of their rows.

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

constexpr uint8_t kNanE4M3 = 0x7f;      // the format has no infinity
constexpr uint8_t kLargestE4M3 = 0x7e;  // 448

// To nearest, ties to even. What rounds beyond 448, infinity too, is 448; NaN stays NaN.
inline uint8_t narrow_e4m3(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  const uint32_t rest = bits_of(x) & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint8_t>(sign | kNanE4M3);
  if (rest >= 0x43e00000) return static_cast<uint8_t>(sign | kLargestE4M3);
  if (rest < 0x3c800000) {
    // Below 2^-6, subnormal or zero: adding 2^14 leaves the multiple of 2^-9, rounded to even, in
    // the low bits.
    return static_cast<uint8_t>(sign | (bits_of(float_from_bits(rest) + 0x1p14f) - 0x46800000));
  }
  const uint32_t rounded = rest + 0x7ffff + (rest >> 20 & 1);
  return static_cast<uint8_t>(sign | (rounded - (uint32_t{120} << 23)) >> 20);
}
