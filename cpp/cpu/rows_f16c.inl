// Rows between storage and float32 in steps of 8 elements; nothing past a row is read or written.
// Included inside the namespaces of the AVX2 and AVX-512 files.

inline __m256 widen_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m256 widen_bfloat(const uint16_t* p) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline void narrow_half(__m256 x, uint16_t* p) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void narrow_bfloat(__m256 x, uint16_t* p) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i top = _mm256_srli_epi32(bits, 16);
  // Round to nearest even: add just under half, plus the bit that would become the last one.
  __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet_nan = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  __m256i result = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet_nan, is_nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// Bytes into the upper halves of 16-bit lanes: e5m2 is the upper half of a float16. VCVTPH2PS keeps
// subnormals in every mode.
inline __m128i load_upper_halves(const uint8_t* p) {
  __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm_unpacklo_epi8(_mm_setzero_si128(), codes);
}
inline __m256 widen_e5m2(const uint8_t* p) { return _mm256_cvtph_ps(load_upper_halves(p)); }
inline __m256 widen_e4m3(const uint8_t* p) {
  // One more bit of exponent and one fewer of fraction: shifted below the sign, e4m3 is a float16
  // that is 2^8 times too small.
  __m128i upper = load_upper_halves(p);
  __m128i sign = _mm_and_si128(upper, _mm_set1_epi16(INT16_MIN));
  __m128i rest = _mm_and_si128(upper, _mm_set1_epi16(0x7f00));
  __m128i half = _mm_or_si128(sign, _mm_srli_epi16(rest, 1));
  // All ones are NaN, which the shift would make 480: a float16's own NaN, in their place.
  __m128i is_nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f00));
  half = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
inline __m256 widen_float(const float* p) { return _mm256_loadu_ps(p); }

inline void narrow_eight_e4m3(__m256 x, uint8_t* p) {
  float lanes[8];
  _mm256_storeu_ps(lanes, x);
  for (int i = 0; i < 8; ++i) p[i] = narrow_e4m3(lanes[i]);
}
inline void narrow_float(__m256 x, float* p) { _mm256_storeu_ps(p, x); }

// The function is a template argument, so that it is inlined.
template <class Stored, __m256 (*widen_eight)(const Stored*)>
inline void widen_row(const void* source, float* target, int n) {
  const auto* stored = static_cast<const Stored*>(source);
  const int whole = n & ~7;
  for (int i = 0; i < whole; i += 8) _mm256_storeu_ps(target + i, widen_eight(stored + i));
  if (whole == n) return;
  Stored last[8] = {};  // the last n % 8 elements
  float wide[8];
  __builtin_memcpy(last, stored + whole, (n - whole) * sizeof(Stored));
  _mm256_storeu_ps(wide, widen_eight(last));
  __builtin_memcpy(target + whole, wide, (n - whole) * sizeof(float));
}

void widen(DType dtype, const void* source, float* target, int n) {
  switch (dtype) {
    case DType::kFloat32: return widen_row<float, widen_float>(source, target, n);
    case DType::kFloat16: return widen_row<uint16_t, widen_half>(source, target, n);
    case DType::kBFloat16: return widen_row<uint16_t, widen_bfloat>(source, target, n);
    case DType::kFloat8E4M3: return widen_row<uint8_t, widen_e4m3>(source, target, n);
    case DType::kFloat8E5M2: return widen_row<uint8_t, widen_e5m2>(source, target, n);
  }
}

template <class Stored, void (*narrow_eight)(__m256, Stored*)>
inline void narrow_row(const float* source, float scale, void* target, int n) {
  auto* stored = static_cast<Stored*>(target);
  const __m256 factor = _mm256_set1_ps(scale);
  const int whole = n & ~7;
  for (int i = 0; i < whole; i += 8) {
    narrow_eight(_mm256_mul_ps(_mm256_loadu_ps(source + i), factor), stored + i);
  }
  if (whole == n) return;
  float wide[8] = {};
  Stored last[8];
  __builtin_memcpy(wide, source + whole, (n - whole) * sizeof(float));
  narrow_eight(_mm256_mul_ps(_mm256_loadu_ps(wide), factor), last);
  __builtin_memcpy(stored + whole, last, (n - whole) * sizeof(Stored));
}

void narrow(DType dtype, const float* source, float scale, void* target, int n) {
  switch (dtype) {
    case DType::kFloat32: return narrow_row<float, narrow_float>(source, scale, target, n);
    case DType::kFloat16: return narrow_row<uint16_t, narrow_half>(source, scale, target, n);
    case DType::kBFloat16: return narrow_row<uint16_t, narrow_bfloat>(source, scale, target, n);
    case DType::kFloat8E4M3:
      return narrow_row<uint8_t, narrow_eight_e4m3>(source, scale, target, n);
    case DType::kFloat8E5M2: return;  // no output has it
  }
}
