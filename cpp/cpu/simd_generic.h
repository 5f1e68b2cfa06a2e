// 4 float32 lanes in the vector extension that GCC and Clang share: any processor.

constexpr int kLanes = 4;
constexpr int kKeyBlock = 4;  // keys of a score block: 4 x 2 accumulators
constexpr int kOutRows = 4;   // rows and vectors of an output block: 4 x 2 accumulators
constexpr int kOutVecs = 2;
// If multiply and add round twice, c's ulp is an error of the weights: 256 keeps it below 1e-5.
constexpr float kHugeLogit = 256.0f;

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));

inline Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
inline Vec broadcast(float x) { return Vec{x, x, x, x}; }
inline Vec add(Vec a, Vec b) { return a + b; }
inline Vec sub(Vec a, Vec b) { return a - b; }
inline Vec mul(Vec a, Vec b) { return a * b; }
inline Vec div(Vec a, Vec b) { return a / b; }
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// Rounded once, which fma() is not on every machine.
inline Vec exact_fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
inline Vec choose(IntVec all_ones, Vec then, Vec otherwise) {
  return (Vec)((all_ones & (IntVec)then) | (~all_ones & (IntVec)otherwise));
}
// max() and min() return the second operand if either is NaN.
inline Vec max(Vec a, Vec b) { return choose((IntVec)(a > b), a, b); }
inline Vec min(Vec a, Vec b) { return choose((IntVec)(a < b), a, b); }
inline Vec abs(Vec a) { return (Vec)((IntVec)a & INT32_MAX); }
inline Vec with_sign_of(Vec magnitude, Vec sign) {
  return (Vec)(((IntVec)sign & INT32_MIN) | (IntVec)magnitude);
}
inline Vec where_less(Vec a, Vec b, Vec then, Vec otherwise) {
  return choose((IntVec)(a < b), then, otherwise);
}
inline bool any_less(Vec a, Vec b) {
  const IntVec less = a < b;
  return (less[0] | less[1] | less[2] | less[3]) != 0;
}
// 2^n where the low bits of t hold n + 127, 0 <= n + 127 < 255.
inline Vec power_from_low_bits(Vec t) { return (Vec)((IntVec)t << 23); }
inline IntVec load_bits(const uint32_t* p) {
  IntVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline Vec where_bit(IntVec bits, uint32_t bit, Vec then, Vec otherwise) {
  return choose((IntVec)((bits & static_cast<int32_t>(bit)) != 0), then, otherwise);
}
inline float sum_lanes(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
