#include <immintrin.h>

#include "base/peak/peak_i8.h"

uint64_t elm_peak_i8__avx512vnni(size_t rounds, int32_t* sum) {
  enum { SUMS = 12 };
  __m512i sums[SUMS], a = _mm512_set1_epi8(1);
  const __m512i b = _mm512_set1_epi8(2);
  for (int i = 0; i < SUMS; ++i) {
    sums[i] = _mm512_setzero_si512();
  }
  for (size_t round = 0; round < rounds; ++round) {
    ELM_PEAK_OPAQUE("v", a);
    _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; ++i) {
      sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
    }
  }
  for (int i = 1; i < SUMS; ++i) {
    sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  }
  *sum = _mm512_reduce_add_epi32(sums[0]);
  return (uint64_t)rounds * SUMS * 64;
}
