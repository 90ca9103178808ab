/* What the AVX2 matrix rows share. A line of a tile is two halves of 8 rows. */
#ifndef ELM_KERNELS_MATMUL_AVX2_H
#define ELM_KERNELS_MATMUL_AVX2_H

#include <immintrin.h>

#include "kernels/kernels.h"
#include "kernels/tile.h"

static inline __m256i load_half_line(const uint8_t* line, size_t half) {
  return _mm256_load_si256((const __m256i*)(const void*)(line + 32 * half));
}

static inline __m256i broadcast4(const void* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return _mm256_set1_epi32(word);
}

/* Has `value` computed here. Else GCC 12 makes the products of all rows before it adds any, and
 * spills the accumulators for them: half the speed. */
static inline __m256i settled(__m256i value) {
  __asm__ volatile("" : "+x"(value));
  return value;
}

/* The low nibble of each 32-bit word in both its 16-bit halves. */
static inline __m256i low_nibble_pairs(__m256i word) {
  const __m256i nibble = _mm256_and_si256(word, _mm256_set1_epi32(15));
  return _mm256_or_si256(nibble, _mm256_slli_epi32(nibble, 16));
}

/* sum_g z * gsum of 8 rows; `scales` is the tile's line of s, z follows. */
static inline __m256i zero_times(const uint8_t* scales, size_t half, const int16_t* gsum) {
  const __m256i low_byte = _mm256_set1_epi16(0xFF);
  const __m256i z0 = load_half_line(scales + ELM_LINE, half);
  const __m256i z1 = load_half_line(scales + 2 * ELM_LINE, half);
  const __m256i even0 = _mm256_madd_epi16(_mm256_and_si256(z0, low_byte), broadcast4(gsum));
  const __m256i odd0 = _mm256_madd_epi16(_mm256_srli_epi16(z0, 8), broadcast4(gsum + 2));
  const __m256i even1 = _mm256_madd_epi16(_mm256_and_si256(z1, low_byte), broadcast4(gsum + 4));
  const __m256i odd1 = _mm256_madd_epi16(_mm256_srli_epi16(z1, 8), broadcast4(gsum + 6));
  return _mm256_add_epi32(_mm256_add_epi32(even0, odd0), _mm256_add_epi32(even1, odd1));
}

/* acc (8 rows) = fmaf((float)isum, D * d, acc); `line` is the tile's line of D. */
static inline void add_scaled(float* acc, __m256i isum, const uint8_t* line, size_t half, float d) {
  const __m256 weight_d = _mm256_load_ps((const float*)(const void*)line + 8 * half);
  const __m256 scale = _mm256_mul_ps(weight_d, _mm256_set1_ps(d));
  _mm256_storeu_ps(acc, _mm256_fmadd_ps(_mm256_cvtepi32_ps(isum), scale, _mm256_loadu_ps(acc)));
}

#endif
