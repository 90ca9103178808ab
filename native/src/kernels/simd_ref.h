/* simd.h in scalar C: the definition. */
#ifndef ELM_KERNELS_SIMD_REF_H
#define ELM_KERNELS_SIMD_REF_H

#include <math.h>
#include <stdint.h>
#include <string.h>

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
