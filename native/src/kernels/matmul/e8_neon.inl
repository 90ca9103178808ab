/* The product of E8 weights for NEON without dotprod: two products fit into 16 bits
 * (2 * 127 * 127 < 32,768), then they widen. */
#include "kernels/matmul/neon.h"

static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t first_row,
                                                              size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + cols / 4 * ELM_LINE;
    const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
    for (size_t v = 0; v < 4; ++v) {
      int32x4_t sum[4][2]; /* 2 rows x 2 each */
      for (size_t m = 0; m < count; ++m) {
        sum[m][0] = sum[m][1] = vdupq_n_s32(0);
      }
      for (size_t k = 0; k < cols; k += 8) {
        const uint8_t* line = tile + k / 4 * ELM_LINE;
        const int8x16_t w0 = vreinterpretq_s8_u8(load_quarter(line, v));
        const int8x16_t w1 = vreinterpretq_s8_u8(load_quarter(line + ELM_LINE, v));
        for (size_t m = 0; m < count; ++m) {
          const int8x8_t a = load_four_twice(q + m * x->stride + k);
          const int8x8_t b = load_four_twice(q + m * x->stride + k + 4);
          int16x8_t low = vmull_s8(vget_low_s8(w0), a);
          int16x8_t high = vmull_s8(vget_high_s8(w0), a);
          low = vmlal_s8(low, vget_low_s8(w1), b);
          high = vmlal_s8(high, vget_high_s8(w1), b);
          sum[m][0] = vpadalq_s16(sum[m][0], low);
          sum[m][1] = vpadalq_s16(sum[m][1], high);
        }
      }
      for (size_t m = 0; m < count; ++m) {
        add_scaled(acc[m] + 4 * v, vpaddq_s32(sum[m][0], sum[m][1]), scales, v,
                   x->d[(first_row + m) * x->num_superblocks + s]);
      }
    }
    tile = scales + ELM_LINE;
  }
}

#include "kernels/matmul/rows_by_four.inl"
