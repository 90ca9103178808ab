/* The int8 product of the AVX-VNNI rows. */
#ifndef ELM_KERNELS_MATMUL_AVXVNNI_H
#define ELM_KERNELS_MATMUL_AVXVNNI_H

#include "kernels/matmul/avx2.h"

/* acc (count, 16) += superblock s of `count` rows (a constant) times cols/4 lines of 16 rows x 4 k;
 * `d` is the line of D. vpdpbusd takes weights + 128: so are the lines of a panel in cache, while
 * those of an E8 tile (a constant, too) come from memory and are signed. */
static inline __attribute__((always_inline)) void int8_times(const elm_q8* x, const uint8_t* lines,
                                                             bool is_e8_tile, const uint8_t* d,
                                                             size_t s, size_t first_row,
                                                             size_t count,
                                                             float (*acc)[ELM_PANEL_ROWS]) {
  const size_t cols = elm_superblock_cols(x->num_cols, s);
  const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
  const size_t block = first_row * x->num_superblocks + s;
  __m256i sum[ELM_GEMV_MAX_ROWS][2];
  for (size_t m = 0; m < count; ++m) {
    sum[m][0] = sum[m][1] = _mm256_set1_epi32(-128 * x->bsum[block + m * x->num_superblocks]);
  }
  for (size_t k = 0; k < cols; k += 4) {
    const uint8_t* line = lines + k / 4 * ELM_LINE;
    __m256i w[2] = {load_half_line(line, 0), load_half_line(line, 1)};
    if (is_e8_tile) {
      _mm_prefetch((const char*)(line + ELM_PREFETCH_BYTES), _MM_HINT_T0);
      w[0] = _mm256_xor_si256(w[0], _mm256_set1_epi8(-128));
      w[1] = _mm256_xor_si256(w[1], _mm256_set1_epi8(-128));
    }
    for (size_t m = 0; m < count; ++m) {
      const __m256i a = broadcast4(q + m * x->stride + k);
      sum[m][0] = _mm256_dpbusd_epi32(sum[m][0], w[0], a);
      sum[m][1] = _mm256_dpbusd_epi32(sum[m][1], w[1], a);
    }
  }
  for (size_t m = 0; m < count; ++m) {
    for (size_t h = 0; h < 2; ++h) {
      add_scaled(acc[m] + 8 * h, sum[m][h], d, h, x->d[block + m * x->num_superblocks]);
    }
  }
}

#endif
