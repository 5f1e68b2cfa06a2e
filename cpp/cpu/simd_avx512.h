// 16 float32 lanes. Included inside the namespace of the one file that is compiled for AVX-512.

constexpr int kLanes = 16;
constexpr int kKeyBlock = 8;  // keys of a score block: 8 x 2 accumulators of 32 registers
constexpr int kOutRows = 4;   // rows and vectors of an output block: 4 x 4 accumulators
constexpr int kOutVecs = 4;
constexpr float kHugeLogit = 16777216.0f;

using Vec = __m512;
using IntVec = __m512i;

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec exact_fma(Vec a, Vec b, Vec c) { return fma(a, b, c); }
// max() and min() return the second operand if either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec with_sign_of(Vec magnitude, Vec sign) {
  const __m512i bit = _mm512_set1_epi32(INT32_MIN);
  __m512i bits = _mm512_and_si512(_mm512_castps_si512(sign), bit);
  return _mm512_castsi512_ps(_mm512_or_si512(bits, _mm512_castps_si512(magnitude)));
}
inline Vec where_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), otherwise, then);
}
inline bool any_less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }
// 2^n where the low bits of t hold n + 127, 0 <= n + 127 < 255.
inline Vec power_from_low_bits(Vec t) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(t), 23));
}
inline IntVec load_bits(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Vec where_bit(IntVec bits, uint32_t bit, Vec then, Vec otherwise) {
  __mmask16 set = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(static_cast<int>(bit)));
  return _mm512_mask_blend_ps(set, otherwise, then);
}
inline float sum_lanes(Vec v) { return _mm512_reduce_add_ps(v); }

#if defined(__AVX512BF16__)
#define PREFLASH_BF16_PAIRS 1
// c + a.lo * b.lo + a.hi * b.hi on lanes that hold pairs of bfloat16.
inline Vec fma_bf16_pairs(Vec a, Vec b, Vec c) {
  return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
#endif
