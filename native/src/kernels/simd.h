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
#include "kernels/simd_avx512.h"
#elif defined(__AVX2__)
#include "kernels/simd_avx2.h"
#elif defined(ELM_NEON)
#include "kernels/simd_neon.h"
#else
#include "kernels/simd_ref.h"
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
