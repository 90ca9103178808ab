/* simd.h for NEON, with or without dot products: four registers. */
#ifndef ELM_KERNELS_SIMD_NEON_H
#define ELM_KERNELS_SIMD_NEON_H

#include <stdint.h>

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

#endif
