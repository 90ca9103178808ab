/* The int8 product of the i8mm rows: smmla multiplies 2 rows x 8 k of activations by 2 rows x 8 k
 * of weights. The including file defines
 *   load_pairs(lines, v)   quarter v of the 128 bytes of 8 k, as pair_up gives it. */
#include "kernels/matmul/neon.h"

/* Has `sum` computed before what follows. Else GCC 12 starts on the next sums while these are in
 * use, and copies registers: 22 cycles instead of 18 for 4 x 16 x 16 k (llvm-mca, Neoverse N2). */
static inline int32x4_t settled(int32x4_t sum) {
  __asm__ volatile("" : "+w"(sum));
  return sum;
}

/* acc (count, 16) += superblock s of `count` rows (a constant, 1..4) times int8 weights, 128 bytes
 * for each 8 k; `d` is the line of D. A last row without a partner is its own. */
static inline __attribute__((always_inline)) void int8_times(const elm_q8* x,
                                                             const uint8_t* weights,
                                                             const uint8_t* d, size_t s,
                                                             size_t first_row, size_t count,
                                                             float (*acc)[ELM_PANEL_ROWS]) {
  const size_t cols = elm_superblock_cols(x->num_cols, s);
  const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
  const size_t num_pairs = (count + 1) / 2;
  int32x4_t sum[2][8]; /* (row pair of x, row pair of weights), each 2 x 2 */
  for (size_t p = 0; p < num_pairs; ++p) {
    for (size_t i = 0; i < 8; ++i) {
      sum[p][i] = vdupq_n_s32(0);
    }
  }
  for (size_t k = 0; k < cols; k += 16) {
    int8x16_t a[2][2]; /* (row pair of x, 8 k) */
    for (size_t p = 0; p < num_pairs; ++p) {
      const size_t partner = 2 * p + 1 < count ? 2 * p + 1 : 2 * p;
      const int64x2_t even = vreinterpretq_s64_s8(vld1q_s8(q + 2 * p * x->stride + k));
      const int64x2_t odd = vreinterpretq_s64_s8(vld1q_s8(q + partner * x->stride + k));
      a[p][0] = vreinterpretq_s8_s64(vzip1q_s64(even, odd));
      a[p][1] = vreinterpretq_s8_s64(vzip2q_s64(even, odd));
    }
    for (size_t half = 0; half < 2; ++half) {
      for (size_t v = 0; v < 4; ++v) {
        const int8x16x2_t w = load_pairs(weights + (k + 8 * half) * ELM_PANEL_ROWS, v);
        for (size_t p = 0; p < num_pairs; ++p) {
          sum[p][2 * v] = vmmlaq_s32(sum[p][2 * v], a[p][half], w.val[0]);
          sum[p][2 * v + 1] = vmmlaq_s32(sum[p][2 * v + 1], a[p][half], w.val[1]);
        }
      }
      for (size_t p = 0; p < num_pairs; ++p) {
        for (size_t i = 0; i < 8; ++i) {
          sum[p][i] = settled(sum[p][i]);
        }
      }
    }
  }
  for (size_t p = 0; p < num_pairs; ++p) {
    for (size_t v = 0; v < 4; ++v) {
      const int64x2_t low = vreinterpretq_s64_s32(sum[p][2 * v]);
      const int64x2_t high = vreinterpretq_s64_s32(sum[p][2 * v + 1]);
      const float* x_d = x->d + (first_row + 2 * p) * x->num_superblocks + s;
      add_scaled(acc[2 * p] + 4 * v, vreinterpretq_s32_s64(vzip1q_s64(low, high)), d, v, x_d[0]);
      if (2 * p + 1 < count) {
        add_scaled(acc[2 * p + 1] + 4 * v, vreinterpretq_s32_s64(vzip2q_s64(low, high)), d, v,
                   x_d[x->num_superblocks]);
      }
    }
  }
}
