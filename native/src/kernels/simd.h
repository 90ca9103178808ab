/* Sixteen float lanes on whatever the including file is compiled for: one AVX-512 register, two of
 * AVX2, four of NEON, or an array. All operations are IEEE and lane by lane, so that an op written
 * on them gives the same bits everywhere. v_max and v_min give their second operand if one is NaN
 * (NEON: the NaN), so the value that may be NaN comes second and is not lost. For elementwise ops
 * and attention only; matrix kernels are written by hand. */
#ifndef ELM_KERNELS_SIMD_H
#define ELM_KERNELS_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>

#define ELM_QUERY_TILE 8 /* queries an attention tile holds in registers */
typedef __m512 f16v;

static inline f16v v_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void v_store(float* p, f16v a) { _mm512_storeu_ps(p, a); }
static inline f16v v_set(float a) { return _mm512_set1_ps(a); }
static inline f16v v_add(f16v a, f16v b) { return _mm512_add_ps(a, b); }
static inline f16v v_mul(f16v a, f16v b) { return _mm512_mul_ps(a, b); }
static inline f16v v_div(f16v a, f16v b) { return _mm512_div_ps(a, b); }
static inline f16v v_fma(f16v a, f16v b, f16v c) { return _mm512_fmadd_ps(a, b, c); }
static inline f16v v_max(f16v a, f16v b) { return _mm512_max_ps(a, b); }
static inline f16v v_min(f16v a, f16v b) { return _mm512_min_ps(a, b); }
static inline f16v v_abs(f16v a) { return _mm512_abs_ps(a); }
/* The larger of two magnitudes by their bits, so that a NaN is the largest. */
static inline f16v v_max_magnitude(f16v a, f16v b) {
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
static inline f16v v_load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(const void*)p));
}
static inline void v_store_half(uint16_t* p, f16v a) {
  _mm256_storeu_si256((__m256i*)(void*)p,
                      _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* 0 where x < bound, else a; a NaN in x keeps a */
static inline f16v v_zero_below(f16v x, float bound, f16v a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_NLT_UQ), a);
}
/* bits(a) + (bits(n) << 23): a * 2^k where the low bits of n hold k */
static inline f16v v_scale_exponent(f16v a, f16v n) {
  return _mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(n), 23)));
}
/* Rounds to the nearest even integer and stores as int8; |a| <= 127. Returns nothing. */
static inline void v_store_int8(int8_t* p, f16v a) {
  _mm_storeu_si128((__m128i*)(void*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

/* Lane i gets lane i ^ h; h is the constant 1, 2, 4 or 8. */
static inline f16v v_swap(f16v x, int h) {
  return h == 1   ? _mm512_permute_ps(x, 0xB1)
         : h == 2 ? _mm512_permute_ps(x, 0x4E)
         : h == 4 ? _mm512_shuffle_f32x4(x, x, 0xB1)
                  : _mm512_shuffle_f32x4(x, x, 0x4E);
}

/* Sixteen int32 sums of four int8 products each: v_dot adds, for lane i, bytes 4i..4i+3 of a line
 * times the four bytes of `four`. Numbers are -127..127. A sum begins with v_dot_zero(t), t the
 * total of all the bytes it will be multiplied by: vpdpbusd takes the line as line + 128. */
typedef __m512i i32v;
typedef __m512i v_line;
static inline v_line v_load_line(const int8_t* p) {
  return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
}
static inline i32v v_dot_zero(int32_t total) { return _mm512_set1_epi32(-128 * total); }
static inline i32v v_dot(i32v sum, v_line line, int32_t four) {
  return _mm512_dpbusd_epi32(sum, line, _mm512_set1_epi32(four));
}
static inline f16v v_from_int(i32v a) { return _mm512_cvtepi32_ps(a); }

#elif defined(__AVX2__)
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

#elif defined(ELM_NEON)
#include <arm_neon.h>

#define ELM_QUERY_TILE 2
typedef float32x4x4_t f16v;

#define V_EACH(expression)        \
  do {                            \
    f16v r_;                      \
    for (int i = 0; i < 4; ++i) { \
      r_.val[i] = (expression);   \
    }                             \
    return r_;                    \
  } while (0)

static inline f16v v_load(const float* p) { V_EACH(vld1q_f32(p + 4 * i)); }
static inline void v_store(float* p, f16v x) {
  for (int i = 0; i < 4; ++i) {
    vst1q_f32(p + 4 * i, x.val[i]);
  }
}
static inline f16v v_set(float x) { V_EACH(vdupq_n_f32(x)); }
static inline f16v v_add(f16v x, f16v y) { V_EACH(vaddq_f32(x.val[i], y.val[i])); }
static inline f16v v_mul(f16v x, f16v y) { V_EACH(vmulq_f32(x.val[i], y.val[i])); }
static inline f16v v_div(f16v x, f16v y) { V_EACH(vdivq_f32(x.val[i], y.val[i])); }
static inline f16v v_fma(f16v x, f16v y, f16v z) {
  V_EACH(vfmaq_f32(z.val[i], x.val[i], y.val[i]));
}
static inline f16v v_max(f16v x, f16v y) { V_EACH(vmaxq_f32(x.val[i], y.val[i])); }
static inline f16v v_min(f16v x, f16v y) { V_EACH(vminq_f32(x.val[i], y.val[i])); }
static inline f16v v_abs(f16v x) { V_EACH(vabsq_f32(x.val[i])); }
static inline f16v v_max_magnitude(f16v x, f16v y) {
  V_EACH(vreinterpretq_f32_u32(
      vmaxq_u32(vreinterpretq_u32_f32(x.val[i]), vreinterpretq_u32_f32(y.val[i]))));
}
static inline f16v v_load_half(const uint16_t* p) {
  V_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
static inline void v_store_half(uint16_t* p, f16v x) {
  for (int i = 0; i < 4; ++i) {
    vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.val[i])));
  }
}
static inline f16v v_zero_below(f16v x, float bound, f16v y) {
  V_EACH(vreinterpretq_f32_u32(
      vbicq_u32(vreinterpretq_u32_f32(y.val[i]), vcltq_f32(x.val[i], vdupq_n_f32(bound)))));
}
static inline f16v v_scale_exponent(f16v x, f16v n) {
  V_EACH(vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x.val[i]),
                                         vshlq_n_u32(vreinterpretq_u32_f32(n.val[i]), 23))));
}
static inline void v_store_int8(int8_t* p, f16v x) {
  const int16x8_t low =
      vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.val[0])), vmovn_s32(vcvtnq_s32_f32(x.val[1])));
  const int16x8_t high =
      vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.val[2])), vmovn_s32(vcvtnq_s32_f32(x.val[3])));
  vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

static inline f16v v_swap(f16v x, int h) {
  V_EACH(h == 1   ? vrev64q_f32(x.val[i])
         : h == 2 ? vextq_f32(x.val[i], x.val[i], 2)
                  : x.val[i ^ (h / 4)]);
}

typedef int32x4x4_t i32v;
typedef int8x16x4_t v_line;
static inline v_line v_load_line(const int8_t* p) {
  v_line r;
  for (int i = 0; i < 4; ++i) {
    r.val[i] = vld1q_s8(p + 16 * i);
  }
  return r;
}
static inline i32v v_dot_zero(int32_t total) {
  (void)total;
  i32v r;
  for (int i = 0; i < 4; ++i) {
    r.val[i] = vdupq_n_s32(0);
  }
  return r;
}
static inline i32v v_dot(i32v sum, v_line line, int32_t four) {
  const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four));
  for (int i = 0; i < 4; ++i) {
#if defined(__ARM_FEATURE_DOTPROD)
    sum.val[i] = vdotq_s32(sum.val[i], line.val[i], b);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(line.val[i]), vget_low_s8(b));
    const int16x8_t high = vmull_s8(vget_high_s8(line.val[i]), vget_high_s8(b));
    sum.val[i] = vaddq_s32(sum.val[i], vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
  }
  return sum;
}
static inline f16v v_from_int(i32v x) { V_EACH(vcvtq_f32_s32(x.val[i])); }

#else /* scalar: the definition */

#define ELM_QUERY_TILE 1
typedef struct f16v {
  float v[16];
} f16v;

#define V_EACH(expression)         \
  do {                             \
    f16v r_;                       \
    for (int i = 0; i < 16; ++i) { \
      r_.v[i] = (expression);      \
    }                              \
    return r_;                     \
  } while (0)

static inline uint32_t v_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline float v_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
static inline float v_half_to_float(uint16_t half) {
  const uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31;
  const uint32_t mantissa = half & 0x3FF;
  if (exponent == 31) {
    return v_float(sign | 0x7F800000 | mantissa << 13);
  }
  if (exponent == 0) { /* subnormal: mantissa * 2^-24, exact */
    const float magnitude = (float)mantissa * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  return v_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
/* Round to nearest even. x is finite and at most 65504 in magnitude, or NaN. */
static inline uint16_t v_float_to_half(float x) {
  const uint32_t bits = v_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) { /* quiet NaN, payload as the hardware keeps it */
    return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
  }
  if (magnitude < 0x38800000) { /* below 2^-14: adding 0.5 rounds at 2^-24 */
    return (uint16_t)(sign | (v_bits(v_float(magnitude) + 0.5f) - 0x3F000000));
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return (uint16_t)(sign | ((rounded >> 13) - (112 << 10)));
}

static inline f16v v_load(const float* p) { V_EACH(p[i]); }
static inline void v_store(float* p, f16v a) { memcpy(p, a.v, sizeof a.v); }
static inline f16v v_set(float a) { V_EACH(a); }
static inline f16v v_add(f16v a, f16v b) { V_EACH(a.v[i] + b.v[i]); }
static inline f16v v_mul(f16v a, f16v b) { V_EACH(a.v[i] * b.v[i]); }
static inline f16v v_div(f16v a, f16v b) { V_EACH(a.v[i] / b.v[i]); }
static inline f16v v_fma(f16v a, f16v b, f16v c) { V_EACH(fmaf(a.v[i], b.v[i], c.v[i])); }
static inline f16v v_max(f16v a, f16v b) { V_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline f16v v_min(f16v a, f16v b) { V_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline f16v v_abs(f16v a) { V_EACH(v_float(v_bits(a.v[i]) & 0x7FFFFFFF)); }
static inline f16v v_max_magnitude(f16v a, f16v b) {
  V_EACH(v_bits(a.v[i]) > v_bits(b.v[i]) ? a.v[i] : b.v[i]);
}
static inline f16v v_load_half(const uint16_t* p) { V_EACH(v_half_to_float(p[i])); }
static inline void v_store_half(uint16_t* p, f16v a) {
  for (int i = 0; i < 16; ++i) {
    p[i] = v_float_to_half(a.v[i]);
  }
}
static inline f16v v_zero_below(f16v x, float bound, f16v a) {
  V_EACH(x.v[i] < bound ? 0.0f : a.v[i]);
}
static inline f16v v_scale_exponent(f16v a, f16v n) {
  V_EACH(v_float(v_bits(a.v[i]) + (v_bits(n.v[i]) << 23)));
}
static inline void v_store_int8(int8_t* p, f16v a) {
  for (int i = 0; i < 16; ++i) { /* 1.5 * 2^23: the sum's low bits are the rounded integer */
    p[i] = (int8_t)(uint8_t)(v_bits(a.v[i] + 12582912.0f) & 0xFF);
  }
}
static inline f16v v_swap(f16v x, int h) { V_EACH(x.v[i ^ h]); }

typedef struct i32v {
  int32_t v[16];
} i32v;
typedef const int8_t* v_line;
static inline v_line v_load_line(const int8_t* p) { return p; }
static inline i32v v_dot_zero(int32_t total) {
  (void)total;
  return (i32v){{0}};
}
static inline i32v v_dot(i32v sum, v_line line, int32_t four) {
  int8_t b[4];
  memcpy(b, &four, sizeof b);
  for (int i = 0; i < 64; ++i) {
    sum.v[i / 4] += line[i] * b[i % 4];
  }
  return sum;
}
static inline f16v v_from_int(i32v a) { V_EACH((float)a.v[i]); }

#endif

/* Lanes i and i + 8, then i + 4, i + 2, i + 1. */
static inline float v_reduce_add(f16v a) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#elif defined(__AVX2__)
  const __m256 eight = _mm256_add_ps(a.a, a.b);
#endif
#if defined(__AVX2__)
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[16];
  v_store(lanes, a);
  for (int width = 8; width >= 1; width /= 2) {
    for (int i = 0; i < width; ++i) {
      lanes[i] += lanes[i + width];
    }
  }
  return lanes[0];
#endif
}

static inline float v_reduce_max(f16v a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(a);
#else
  float lanes[16];
  v_store(lanes, a);
  float maximum = lanes[0];
  for (int i = 1; i < 16; ++i) {
    maximum = lanes[i] > maximum ? lanes[i] : maximum;
  }
  return maximum;
#endif
}

/* exp for x <= 88; 0 below -87. Cody-Waite reduction, then a polynomial of degree 6 fitted for the
 * least relative error on |r| <= ln(2)/2 (0.05 ulp): about 1 ulp. exp(0) is exactly 1. */
static inline f16v v_exp(f16v x) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: the sum's low mantissa bits are the integer */
  const f16v n = v_fma(x, v_set(1.44269504f), v_set(magic));
  const f16v k = v_add(n, v_set(-magic));
  f16v r = v_fma(k, v_set(-0.693359375f), x);
  r = v_fma(k, v_set(2.12194440e-4f), r);
  f16v p = v_set(1.38145709e-3f);
  p = v_fma(p, r, v_set(8.36873055e-3f));
  p = v_fma(p, r, v_set(4.16683890e-2f));
  p = v_fma(p, r, v_set(1.66665211e-1f));
  p = v_fma(p, r, v_set(4.99999940e-1f));
  p = v_fma(p, r, v_set(1.0f));
  p = v_fma(p, r, v_set(1.0f));
  return v_zero_below(x, -87.0f, v_scale_exponent(p, n));
}

/* 1 / (1 + exp(-x)) */
static inline f16v v_sigmoid(f16v x) {
  const f16v negative = v_mul(x, v_set(-1.0f));
  const f16v e = v_exp(v_min(negative, v_set(88.0f)));
  return v_div(v_set(1.0f), v_add(v_set(1.0f), e));
}

#endif
