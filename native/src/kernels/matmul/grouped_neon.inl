/* The product of E4 and E5 weights for NEON without dotprod; the including file defines ELM_FORMAT.
 * A group's codes times activations are added up in 16 bits (8 * 31 * 127 < 32,768), then widened
 * and multiplied by s; sum_g z * gsum is taken off. */
#include "kernels/matmul/neon.h"

static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t first_row,
                                                              size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + elm_code_bytes(ELM_FORMAT, cols);
    const uint8_t* next = scales + 4 * ELM_LINE;
    const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
    for (size_t v = 0; v < 4; ++v) {
      const uint8x16_t word = load_quarter(scales, v);
      int32x4_t sum[4];
      for (size_t m = 0; m < count; ++m) {
        sum[m] = vdupq_n_s32(0);
      }
      for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
        int16x8_t dot[4][2]; /* 2 rows x 4 k each */
        for (size_t m = 0; m < count; ++m) {
          dot[m][0] = dot[m][1] = vdupq_n_s16(0);
        }
        const uint8_t* group = tile + g * elm_group_bytes(ELM_FORMAT);
        uint8x16_t fifth = load_fifth(ELM_FORMAT, group, v);
        prefetch_part(ELM_FORMAT, next + g * elm_group_bytes(ELM_FORMAT), v);
#pragma GCC unroll 1 /* unrolled, GCC 12 spills: 6.2 MAC a cycle, not 7.7 (llvm-mca, A72) */
        for (size_t l = 0; l < 4; ++l) {
          uint8x16_t low_codes, high_codes;
          unpack_quarter(ELM_FORMAT, group + l * ELM_LINE, v, &fifth, &low_codes, &high_codes);
          const int8x16_t low = vreinterpretq_s8_u8(low_codes);
          const int8x16_t high = vreinterpretq_s8_u8(high_codes);
          for (size_t m = 0; m < count; ++m) {
            const int8_t* at = q + m * x->stride + g * ELM_GROUP + 8 * l;
            const int8x8_t a = load_four_twice(at);
            const int8x8_t b = load_four_twice(at + 4);
            dot[m][0] = vmlal_s8(dot[m][0], vget_low_s8(low), a);
            dot[m][1] = vmlal_s8(dot[m][1], vget_high_s8(low), a);
            dot[m][0] = vmlal_s8(dot[m][0], vget_low_s8(high), b);
            dot[m][1] = vmlal_s8(dot[m][1], vget_high_s8(high), b);
          }
        }
        const int32x4_t scale = vreinterpretq_s32_u32(group_scale(word, g));
        for (size_t m = 0; m < count; ++m) {
          const int32x4_t total = vpaddq_s32(vpaddlq_s16(dot[m][0]), vpaddlq_s16(dot[m][1]));
          sum[m] = vmlaq_s32(sum[m], total, scale);
        }
      }
      for (size_t m = 0; m < count; ++m) {
        const size_t block = (first_row + m) * x->num_superblocks + s;
        const int32x4_t zero = zero_times(scales, v, x->gsum + 8 * block);
        add_scaled(acc[m] + 4 * v, vsubq_s32(sum[m], zero), scales + 3 * ELM_LINE, v, x->d[block]);
      }
    }
    tile = next;
  }
}

#include "kernels/matmul/rows_by_four.inl"
