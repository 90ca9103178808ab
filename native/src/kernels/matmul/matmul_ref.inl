/* The definition of both matrix products; the including file defines ELM_FORMAT. */
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/tile.h"

static void matmul(const elm_matmul_args* args) {
  const elm_q8* x = args->x;
  for (size_t panel = args->first_panel; panel < args->last_panel; ++panel) {
    for (size_t m = 0; m < args->num_rows; ++m) {
      float* out = args->out + m * args->out_stride + panel * ELM_PANEL_ROWS;
      float acc[ELM_PANEL_ROWS] = {0};
      const uint8_t* tile = args->weights + panel * args->panel_bytes;
      for (size_t s = 0; s < x->num_superblocks; ++s) {
        const size_t cols = elm_superblock_cols(x->num_cols, s);
        const int8_t* q = x->q + m * x->stride + s * ELM_SUPERBLOCK;
        const float d = x->d[m * x->num_superblocks + s];
        for (size_t r = 0; r < ELM_PANEL_ROWS; ++r) {
          int32_t sum = 0;
          for (size_t k = 0; k < cols; ++k) {
            sum += elm_weight(ELM_FORMAT, tile, cols, r, k) * q[k];
          }
          acc[r] = fmaf((float)sum, elm_d(ELM_FORMAT, tile, cols, r) * d, acc[r]);
        }
        tile += elm_tile_bytes(ELM_FORMAT, cols);
      }
      memcpy(out, acc, sizeof acc);
    }
  }
}
