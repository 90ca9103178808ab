/* simd.h for AVX-512: one register. */
#ifndef ELM_KERNELS_SIMD_AVX512_H
#define ELM_KERNELS_SIMD_AVX512_H

#include <stdint.h>

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

#endif
