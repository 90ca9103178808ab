/* What the NEON matrix rows share. A line of a tile is four quarters of 4 rows. */
#ifndef ELM_KERNELS_MATMUL_NEON_H
#define ELM_KERNELS_MATMUL_NEON_H

#include <arm_neon.h>

#include "kernels/kernels.h"
#include "kernels/tile.h"

static inline uint8x16_t load_quarter(const uint8_t* line, size_t quarter) {
  return vld1q_u8(line + 16 * quarter);
}

/* Two times 4 rows x 4 k, one after the other along k, as rows of 8 k: rows 0 and 1, 2 and 3. */
static inline int8x16x2_t pair_up(uint8x16_t first, uint8x16_t second) {
  const uint32x4_t a = vreinterpretq_u32_u8(first), b = vreinterpretq_u32_u8(second);
  const int8x16x2_t pairs = {
      {vreinterpretq_s8_u32(vzip1q_u32(a, b)), vreinterpretq_s8_u32(vzip2q_u32(a, b))}};
  return pairs;
}

/* Codes of E4 and E5; `format` is a constant. The quarter of the line of fifth bits of a group, for
 * unpack_quarter. */
static inline uint8x16_t load_fifth(elm_format format, const uint8_t* group, size_t quarter) {
  return format == ELM_FORMAT_E5 ? load_quarter(group + 4 * ELM_LINE, quarter) : vdupq_n_u8(0);
}

/* Codes of a quarter of a line: `low` are 4 rows x the first 4 k, `high` the other 4. Lines of a
 * group in order: those of the next line move to the bits 0 and 4 of *fifth. */
static inline __attribute__((always_inline)) void unpack_quarter(elm_format format,
                                                                 const uint8_t* line,
                                                                 size_t quarter, uint8x16_t* fifth,
                                                                 uint8x16_t* low,
                                                                 uint8x16_t* high) {
  const uint8x16_t codes = load_quarter(line, quarter);
  if (format == ELM_FORMAT_E5) {
    const uint8x16_t pair = vandq_u8(*fifth, vdupq_n_u8(0x11));
    *low = vsliq_n_u8(codes, pair, 4);
    *high = vsriq_n_u8(pair, codes, 4);
    *fifth = vshrq_n_u8(*fifth, 1);
  } else {
    *low = vandq_u8(codes, vdupq_n_u8(15));
    *high = vshrq_n_u8(codes, 4);
  }
}

/* A group's codes are read a quarter at a time: each asks for its part of the lines of `next`. */
static inline void prefetch_part(elm_format format, const uint8_t* next, size_t quarter) {
  __builtin_prefetch(next + quarter * ELM_LINE);
  if (format == ELM_FORMAT_E5 && quarter == 3) {
    __builtin_prefetch(next + 4 * ELM_LINE);
  }
}

/* s of group g of 4 rows; `word` is a quarter of the line of s. */
static inline uint32x4_t group_scale(uint8x16_t word, size_t g) {
  const int32x4_t right = vdupq_n_s32(-4 * (int32_t)g);
  return vandq_u32(vshlq_u32(vreinterpretq_u32_u8(word), right), vdupq_n_u32(15));
}

/* Four 16-bit numbers: the two at p, twice. */
static inline int16x4_t load_pair_twice(const int16_t* p) {
  int32_t pair;
  memcpy(&pair, p, sizeof pair);
  return vreinterpret_s16_s32(vdup_n_s32(pair));
}

/* Eight bytes: the four at p, twice. */
static inline int8x8_t load_four_twice(const int8_t* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return vreinterpret_s8_s32(vdup_n_s32(word));
}

/* sum_g z * gsum of 4 rows; `scales` is the tile's line of s, z follows. */
static inline int32x4_t zero_times(const uint8_t* scales, size_t quarter, const int16_t* gsum) {
  int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
  for (size_t i = 0; i < 2; ++i) {
    const uint8x16_t bytes = load_quarter(scales + (1 + i) * ELM_LINE, quarter);
    const uint16x8_t z = vreinterpretq_u16_u8(bytes);
    const int16x8_t even = vreinterpretq_s16_u16(vandq_u16(z, vdupq_n_u16(0xFF)));
    const int16x8_t odd = vreinterpretq_s16_u16(vshrq_n_u16(z, 8));
    const int16x4_t even_sums = load_pair_twice(gsum + 4 * i);
    const int16x4_t odd_sums = load_pair_twice(gsum + 4 * i + 2);
    low = vmlal_s16(low, vget_low_s16(even), even_sums);
    low = vmlal_s16(low, vget_low_s16(odd), odd_sums);
    high = vmlal_s16(high, vget_high_s16(even), even_sums);
    high = vmlal_s16(high, vget_high_s16(odd), odd_sums);
  }
  return vpaddq_s32(low, high);
}

/* acc (4 rows) = fmaf((float)isum, D * d, acc); `line` is the tile's line of D. */
static inline void add_scaled(float* acc, int32x4_t isum, const uint8_t* line, size_t quarter,
                              float d) {
  const float32x4_t weight_d = vreinterpretq_f32_u8(load_quarter(line, quarter));
  const float32x4_t scale = vmulq_f32(weight_d, vdupq_n_f32(d));
  vst1q_f32(acc, vfmaq_f32(vld1q_f32(acc), vcvtq_f32_s32(isum), scale));
}

#endif
