/* Products of E4 and E5 weights for NEON with dotprod; the including file defines ELM_FORMAT. */
#include "kernels/matmul/neon_dotprod.h"

/* Int8: line k/4 is 16 rows x 4 k. */
typedef struct expanded_tile {
  uint8_t weights[ELM_SUPERBLOCK / 4 * ELM_LINE];
} expanded_tile;

static inline void store_line(expanded_tile* out, size_t l, size_t v, uint8x16_t first,
                              uint8x16_t second) {
  uint8_t* to = out->weights + 2 * l * ELM_LINE + 16 * v;
  vst1q_u8(to, first);
  vst1q_u8(to + ELM_LINE, second);
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
