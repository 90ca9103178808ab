/* The product of E4 weights for NEON without dotprod. A group's codes times activations are added
 * up in 16 bits (8 * 15 * 127 < 32,768), then widened and multiplied by s; sum_g z * gsum is taken
 * off. */
#include "kernels/matmul/neon.h"

static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t first_row,
                                                              size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  const uint8x16_t nibble = vdupq_n_u8(15);
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + cols / 8 * ELM_LINE;
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
        __builtin_prefetch(next + (4 * g + v) * ELM_LINE);
        for (size_t l = 4 * g; l < 4 * g + 4; ++l) {
          const uint8x16_t codes = load_quarter(tile + l * ELM_LINE, v);
          const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(codes, nibble));
          const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(codes, 4));
          for (size_t m = 0; m < count; ++m) {
            const int8x8_t a = load_four_twice(q + m * x->stride + 8 * l);
            const int8x8_t b = load_four_twice(q + m * x->stride + 8 * l + 4);
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
