/* The product of E8 weights for AVX-VNNI. */
#include "kernels/matmul/avxvnni.h"

static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t first_row,
                                                              size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    int8_times(x, tile, true, tile + cols / 4 * ELM_LINE, s, first_row, count, acc);
    tile += elm_tile_bytes(ELM_FORMAT_E8, cols);
  }
}

#include "kernels/matmul/rows_by_four.inl"
