#include <immintrin.h>

#include "base/peak/peak_i8.h"

uint64_t elm_peak_i8__avxvnni(size_t rounds, int32_t* sum) {
  enum { SUMS = 12 };
  __m256i sums[SUMS], a = _mm256_set1_epi8(1);
  const __m256i b = _mm256_set1_epi8(2);
  for (int i = 0; i < SUMS; ++i) {
    sums[i] = _mm256_setzero_si256();
  }
  for (size_t round = 0; round < rounds; ++round) {
    ELM_PEAK_OPAQUE("x", a);
    _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; ++i) {
      sums[i] = _mm256_dpbusd_epi32(sums[i], a, b);
    }
  }
  for (int i = 1; i < SUMS; ++i) {
    sums[0] = _mm256_add_epi32(sums[0], sums[i]);
  }
  *sum = _mm256_extract_epi32(sums[0], 0);
  return (uint64_t)rounds * SUMS * 32;
}
