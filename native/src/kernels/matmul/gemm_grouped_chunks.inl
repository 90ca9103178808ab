/* The loops of a product of E4 or E5 weights that expands every tile once for a chunk of rows. The
 * including file defines ELM_FORMAT and
 *   expanded_tile        a tile as the product reads it; it stays in the first-level cache while a
 *                        chunk passes by, whose float sums wait in 8 KiB beside it: in `out` they
 *                        would lie on a page each
 *   expand_tile(tile, cols, expanded)
 *   block_times(x, expanded, scales, s, first_row, count, acc)
 *                        acc (count, 16) += superblock s of `count` rows (a constant, 1..4);
 *                        `scales` is the tile's line of s. */
#include "kernels/kernels.h"
#include "kernels/tile.h"

enum { GEMM_CHUNK = 128, GEMM_ROWS = 4 };

/* Rows [first_row, first_row + num_rows), at most GEMM_CHUNK, of one panel. */
static void chunk_times(const elm_matmul_args* args, size_t panel, size_t first_row,
                        size_t num_rows) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  expanded_tile expanded;
  _Alignas(64) float acc[GEMM_CHUNK][ELM_PANEL_ROWS];
  memset(acc, 0, num_rows * sizeof acc[0]);
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + elm_code_bytes(ELM_FORMAT, cols);
    expand_tile(tile, cols, &expanded);
    tile += elm_tile_bytes(ELM_FORMAT, cols);
    /* the next tile comes from memory while this one is multiplied */
    for (size_t i = 0; i < elm_tile_bytes(ELM_FORMAT, ELM_SUPERBLOCK); i += ELM_LINE) {
      __builtin_prefetch(tile + i, 0, 2);
    }
    size_t m = 0;
    for (; m + GEMM_ROWS <= num_rows; m += GEMM_ROWS) {
      block_times(x, &expanded, scales, s, first_row + m, GEMM_ROWS, acc + m);
    }
    switch (num_rows - m) {
      case 3: block_times(x, &expanded, scales, s, first_row + m, 3, acc + m); break;
      case 2: block_times(x, &expanded, scales, s, first_row + m, 2, acc + m); break;
      case 1: block_times(x, &expanded, scales, s, first_row + m, 1, acc + m); break;
      default: break;
    }
  }
  for (size_t m = 0; m < num_rows; ++m) {
    float* out = args->out + (first_row + m) * args->out_stride + panel * ELM_PANEL_ROWS;
    memcpy(out, acc[m], sizeof acc[m]);
  }
}

static void gemm(const elm_matmul_args* args) {
  for (size_t row = 0; row < args->num_rows; row += GEMM_CHUNK) {
    const size_t left = args->num_rows - row;
    for (size_t panel = args->first_panel; panel < args->last_panel; ++panel) {
      chunk_times(args, panel, row, left < GEMM_CHUNK ? left : GEMM_CHUNK);
    }
  }
}
