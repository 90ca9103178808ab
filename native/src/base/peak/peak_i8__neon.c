#include <arm_neon.h>

#include "base/peak/peak_i8.h"

uint64_t elm_peak_i8__neon(size_t rounds, int32_t* sum) {
  enum { SUMS = 8 };
  int32x4_t sums[SUMS];
  int8x16_t a = vdupq_n_s8(1);
  const int8x16_t b = vdupq_n_s8(2);
  for (int i = 0; i < SUMS; ++i) {
    sums[i] = vdupq_n_s32(0);
  }
  for (size_t round = 0; round < rounds; ++round) {
    _Pragma("GCC unroll 8") for (int i = 0; i < SUMS; ++i) {
      ELM_PEAK_OPAQUE("w", a);
      const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
      sums[i] = vpadalq_s16(sums[i], vmlal_high_s8(low, a, b));
    }
  }
  for (int i = 1; i < SUMS; ++i) {
    sums[0] = vaddq_s32(sums[0], sums[i]);
  }
  *sum = vaddvq_s32(sums[0]);
  return (uint64_t)rounds * SUMS * 16;
}
