#include <arm_neon.h>

#include "base/peak/peak_i8.h"

uint64_t elm_peak_i8__neon_i8mm(size_t rounds, int32_t* sum) {
  enum { SUMS = 12 };
  int32x4_t sums[SUMS];
  int8x16_t a = vdupq_n_s8(1);
  const int8x16_t b = vdupq_n_s8(2);
  for (int i = 0; i < SUMS; ++i) {
    sums[i] = vdupq_n_s32(0);
  }
  for (size_t round = 0; round < rounds; ++round) {
    ELM_PEAK_OPAQUE("w", a);
    _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; ++i) { sums[i] = vmmlaq_s32(sums[i], a, b); }
  }
  for (int i = 1; i < SUMS; ++i) {
    sums[0] = vaddq_s32(sums[0], sums[i]);
  }
  *sum = vaddvq_s32(sums[0]);
  return (uint64_t)rounds * SUMS * 32;
}
