/* simd.h for AVX2 with FMA and F16C: two registers. */
#ifndef ELM_KERNELS_SIMD_AVX2_H
#define ELM_KERNELS_SIMD_AVX2_H

#include <stdint.h>

#include <immintrin.h>

#define ELM_QUERY_TILE 2
typedef struct f16v {
  __m256 a, b;
} f16v;

#define V_EACH(expression_a, expression_b) \
  do {                                     \
    f16v r_;                               \
    r_.a = (expression_a);                 \
    r_.b = (expression_b);                 \
    return r_;                             \
  } while (0)

static inline f16v v_load(const float* p) { V_EACH(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void v_store(float* p, f16v x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline f16v v_set(float x) { V_EACH(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline f16v v_add(f16v x, f16v y) {
  V_EACH(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b));
}
static inline f16v v_mul(f16v x, f16v y) {
  V_EACH(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b));
}
static inline f16v v_div(f16v x, f16v y) {
  V_EACH(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b));
}
static inline f16v v_fma(f16v x, f16v y, f16v z) {
  V_EACH(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b));
}
static inline f16v v_max(f16v x, f16v y) {
  V_EACH(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b));
}
static inline f16v v_min(f16v x, f16v y) {
  V_EACH(_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b));
}
static inline f16v v_abs(f16v x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  V_EACH(_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask));
}
static inline __m256 v_max_bits(__m256 x, __m256 y) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
}
static inline f16v v_max_magnitude(f16v x, f16v y) {
  V_EACH(v_max_bits(x.a, y.a), v_max_bits(x.b, y.b));
}
static inline f16v v_load_half(const uint16_t* p) {
  const __m128i low = _mm_loadu_si128((const __m128i*)(const void*)p);
  const __m128i high = _mm_loadu_si128((const __m128i*)(const void*)(p + 8));
  V_EACH(_mm256_cvtph_ps(low), _mm256_cvtph_ps(high));
}
static inline void v_store_half(uint16_t* p, f16v x) {
  _mm_storeu_si128((__m128i*)(void*)p,
                   _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(void*)(p + 8),
                   _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline f16v v_zero_below(f16v x, float bound, f16v y) {
  const __m256 limit = _mm256_set1_ps(bound);
  V_EACH(_mm256_and_ps(y.a, _mm256_cmp_ps(x.a, limit, _CMP_NLT_UQ)),
         _mm256_and_ps(y.b, _mm256_cmp_ps(x.b, limit, _CMP_NLT_UQ)));
}
static inline __m256 v_scale_half(__m256 x, __m256 n) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(n), 23)));
}
static inline f16v v_scale_exponent(f16v x, f16v n) {
  V_EACH(v_scale_half(x.a, n.a), v_scale_half(x.b, n.b));
}
static inline void v_store_int8(int8_t* p, f16v x) {
  const __m256i words =
      _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); /* a0 b0 a1 b1 */
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  _mm_storeu_si128((__m128i*)(void*)p, _mm_packs_epi16(_mm256_castsi256_si128(ordered),
                                                       _mm256_extracti128_si256(ordered, 1)));
}

static inline __m256 v_swap_half(__m256 x, int h) {
  return h == 1   ? _mm256_permute_ps(x, 0xB1)
         : h == 2 ? _mm256_permute_ps(x, 0x4E)
                  : _mm256_permute2f128_ps(x, x, 1);
}
static inline f16v v_swap(f16v x, int h) {
  V_EACH(h == 8 ? x.b : v_swap_half(x.a, h), h == 8 ? x.a : v_swap_half(x.b, h));
}

typedef struct i32v {
  __m256i a, b;
} i32v;
typedef struct v_line {
  __m256i a, b, abs_a, abs_b;
} v_line;
static inline v_line v_load_line(const int8_t* p) {
  v_line r;
  r.a = _mm256_loadu_si256((const __m256i*)(const void*)p);
  r.b = _mm256_loadu_si256((const __m256i*)(const void*)(p + 32));
  r.abs_a = _mm256_abs_epi8(r.a);
  r.abs_b = _mm256_abs_epi8(r.b);
  return r;
}
static inline i32v v_dot_zero(int32_t total) {
  (void)total;
  return (i32v){_mm256_setzero_si256(), _mm256_setzero_si256()};
}
static inline i32v v_dot(i32v sum, v_line line, int32_t four) {
  const __m256i b = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
  const __m256i low = _mm256_maddubs_epi16(line.abs_a, _mm256_sign_epi8(b, line.a));
  const __m256i high = _mm256_maddubs_epi16(line.abs_b, _mm256_sign_epi8(b, line.b));
  sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(low, ones));
  sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(high, ones));
  return sum;
}
static inline f16v v_from_int(i32v x) { V_EACH(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }

#endif
