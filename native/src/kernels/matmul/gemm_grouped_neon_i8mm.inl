/* Products of E4 and E5 weights for NEON with i8mm; the including file defines ELM_FORMAT. */
#include "kernels/matmul/neon.h"

/* Int8: for each 8 k, 8 pairs of rows, 2 rows x 8 k. */
typedef struct expanded_tile {
  _Alignas(64) uint8_t weights[ELM_SUPERBLOCK / 4 * ELM_LINE];
} expanded_tile;

static inline int8x16x2_t load_pairs(const uint8_t* lines, size_t v) {
  const int8_t* from = (const int8_t*)lines + 32 * v;
  const int8x16x2_t pairs = {{vld1q_s8(from), vld1q_s8(from + 16)}};
  return pairs;
}

#include "kernels/matmul/neon_i8mm.inl"

static inline void store_line(expanded_tile* out, size_t l, size_t v, uint8x16_t first,
                              uint8x16_t second) {
  vst1q_s8_x2((int8_t*)out->weights + 2 * l * ELM_LINE + 32 * v, pair_up(first, second));
}

#include "kernels/matmul/expand_grouped_neon.inl"

static inline
    __attribute__((always_inline)) void block_times(const elm_q8* x, const expanded_tile* tile,
                                                    const uint8_t* scales, size_t s,
                                                    size_t first_row, size_t count,
                                                    float (*acc)[ELM_PANEL_ROWS]) {
  int8_times(x, tile->weights, scales + 3 * ELM_LINE, s, first_row, count, acc);
}

#include "kernels/matmul/gemm_grouped_chunks.inl"
