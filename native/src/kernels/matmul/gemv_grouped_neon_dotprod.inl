/* Products of few rows with E4 and E5 weights for NEON with dotprod; the including file defines
 * ELM_FORMAT. */
#include "kernels/matmul/neon.h"

/* dot[m] += line l's codes times activations; line l holds words 2l and 2l + 1 of the group, which
 * are lanes of a[m][l / 2]. */
#define LINE_TIMES(l, lane)                                                                 \
  do {                                                                                      \
    uint8x16_t low_codes, high_codes;                                                       \
    unpack_quarter(ELM_FORMAT, group + (l) * ELM_LINE, v, &fifth, &low_codes, &high_codes); \
    const int8x16_t low = vreinterpretq_s8_u8(low_codes);                                   \
    const int8x16_t high = vreinterpretq_s8_u8(high_codes);                                 \
    for (size_t m = 0; m < count; ++m) {                                                    \
      dot[m] = vdotq_laneq_s32(dot[m], low, a[m][(l) / 2], lane);                           \
      dot[m] = vdotq_laneq_s32(dot[m], high, a[m][(l) / 2], (lane) + 1);                    \
    }                                                                                       \
  } while (0)

/* The codes' dot products per group are multiplied by s, and sum_g z * gsum is taken off. */
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
      int32x4_t sum[ELM_GEMV_MAX_ROWS];
      for (size_t m = 0; m < count; ++m) {
        sum[m] = vdupq_n_s32(0);
      }
      for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
        const uint8_t* group = tile + g * elm_group_bytes(ELM_FORMAT);
        uint8x16_t fifth = load_fifth(ELM_FORMAT, group, v);
        int8x16_t a[ELM_GEMV_MAX_ROWS][2];
        int32x4_t dot[ELM_GEMV_MAX_ROWS];
        for (size_t m = 0; m < count; ++m) {
          a[m][0] = vld1q_s8(q + m * x->stride + g * ELM_GROUP);
          a[m][1] = vld1q_s8(q + m * x->stride + g * ELM_GROUP + 16);
          dot[m] = vdupq_n_s32(0);
        }
        prefetch_part(ELM_FORMAT, next + g * elm_group_bytes(ELM_FORMAT), v);
        LINE_TIMES(0, 0);
        LINE_TIMES(1, 2);
        LINE_TIMES(2, 0);
        LINE_TIMES(3, 2);
        const int32x4_t scale = vreinterpretq_s32_u32(group_scale(word, g));
        for (size_t m = 0; m < count; ++m) {
          sum[m] = vmlaq_s32(sum[m], dot[m], scale);
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
