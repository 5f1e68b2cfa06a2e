// 8 float32 lanes. Included inside the namespace of the one file that is compiled for AVX2.

constexpr int kLanes = 8;
constexpr int kKeyBlock = 6;  // keys of a score block: 6 x 2 accumulators of 16 registers
constexpr int kOutRows = 4;   // rows and vectors of an output block: 4 x 3 accumulators
constexpr int kOutVecs = 3;
constexpr float kHugeLogit = 16777216.0f;

using Vec = __m256;
using IntVec = __m256i;

inline Vec load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec exact_fma(Vec a, Vec b, Vec c) { return fma(a, b, c); }
// max() and min() return the second operand if either is NaN.
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Vec with_sign_of(Vec magnitude, Vec sign) {
  return _mm256_or_ps(_mm256_and_ps(sign, _mm256_set1_ps(-0.0f)), magnitude);
}
inline Vec where_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
inline bool any_less(Vec a, Vec b) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) != 0;
}
// 2^n where the low bits of t hold n + 127, 0 <= n + 127 < 255.
inline Vec power_from_low_bits(Vec t) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(t), 23));
}
inline IntVec load_bits(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Vec where_bit(IntVec bits, uint32_t bit, Vec then, Vec otherwise) {
  __m256i wanted = _mm256_set1_epi32(static_cast<int>(bit));
  __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(bits, wanted), wanted);
  return _mm256_blendv_ps(otherwise, then, _mm256_castsi256_ps(set));
}
inline float sum_lanes(Vec v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
}
