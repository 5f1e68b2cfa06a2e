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

inline __m256 widen_eight(DType dtype, const void* source, int i) {
  const auto* half = static_cast<const uint16_t*>(source) + i;
  return dtype == DType::kFloat32   ? _mm256_loadu_ps(static_cast<const float*>(source) + i)
         : dtype == DType::kFloat16 ? widen_half(half)
                                    : widen_bfloat(half);
}
inline void narrow_eight(DType dtype, __m256 x, void* target, int i) {
  auto* half = static_cast<uint16_t*>(target) + i;
  if (dtype == DType::kFloat32) {
    _mm256_storeu_ps(static_cast<float*>(target) + i, x);
  } else if (dtype == DType::kFloat16) {
    narrow_half(x, half);
  } else {
    narrow_bfloat(x, half);
  }
}

void widen(DType dtype, const void* source, float* target, int n) {
  const int whole = n & ~7;
  for (int i = 0; i < whole; i += 8) _mm256_storeu_ps(target + i, widen_eight(dtype, source, i));
  if (whole == n) return;
  float stored[8] = {}, wide[8];  // the last n % 8 elements, as they lie in memory
  const int size = dtype == DType::kFloat32 ? 4 : 2;
  __builtin_memcpy(stored, static_cast<const char*>(source) + whole * size, (n - whole) * size);
  _mm256_storeu_ps(wide, widen_eight(dtype, stored, 0));
  __builtin_memcpy(target + whole, wide, (n - whole) * sizeof(float));
}

void narrow(DType dtype, const float* source, float scale, void* target, int n) {
  const __m256 factor = _mm256_set1_ps(scale);
  const int whole = n & ~7;
  for (int i = 0; i < whole; i += 8) {
    narrow_eight(dtype, _mm256_mul_ps(_mm256_loadu_ps(source + i), factor), target, i);
  }
  if (whole == n) return;
  float wide[8] = {}, stored[8];
  const int size = dtype == DType::kFloat32 ? 4 : 2;
  __builtin_memcpy(wide, source + whole, (n - whole) * sizeof(float));
  narrow_eight(dtype, _mm256_mul_ps(_mm256_loadu_ps(wide), factor), stored, 0);
  __builtin_memcpy(static_cast<char*>(target) + whole * size, stored, (n - whole) * size);
}
