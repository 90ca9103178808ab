/* The int8 product of the dotprod rows. */
#ifndef ELM_KERNELS_MATMUL_NEON_DOTPROD_H
#define ELM_KERNELS_MATMUL_NEON_DOTPROD_H

#include "kernels/matmul/neon.h"

/* sum[m][v] += 16 rows x 4 k of weights times word `lane` of a[m]. */
#define ELM_STEP(lane)                                                                 \
  do {                                                                                 \
    for (size_t v = 0; v < 4; ++v) {                                                   \
      const int8x16_t w =                                                              \
          vreinterpretq_s8_u8(load_quarter(weights + (k / 4 + (lane)) * ELM_LINE, v)); \
      for (size_t m = 0; m < count; ++m) {                                             \
        sum[m][v] = vdotq_laneq_s32(sum[m][v], w, a[m], lane);                         \
      }                                                                                \
    }                                                                                  \
  } while (0)

/* acc (count, 16) += superblock s of `count` rows (a constant, 1..4) times int8 weights, cols/4
 * lines of 16 rows x 4 k; `d` is the line of D. */
static inline __attribute__((always_inline)) void int8_times(const elm_q8* x,
                                                             const uint8_t* weights,
                                                             const uint8_t* d, size_t s,
                                                             size_t first_row, size_t count,
                                                             float (*acc)[ELM_PANEL_ROWS]) {
  const size_t cols = elm_superblock_cols(x->num_cols, s);
  const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
  int32x4_t sum[4][4];
  for (size_t m = 0; m < count; ++m) {
    for (size_t v = 0; v < 4; ++v) {
      sum[m][v] = vdupq_n_s32(0);
    }
  }
  for (size_t k = 0; k < cols; k += 16) {
    int8x16_t a[4];
    for (size_t m = 0; m < count; ++m) {
      a[m] = vld1q_s8(q + m * x->stride + k);
    }
    ELM_STEP(0);
    ELM_STEP(1);
    ELM_STEP(2);
    ELM_STEP(3);
  }
  for (size_t m = 0; m < count; ++m) {
    for (size_t v = 0; v < 4; ++v) {
      add_scaled(acc[m] + 4 * v, sum[m][v], d, v, x->d[(first_row + m) * x->num_superblocks + s]);
    }
  }
}

#endif
