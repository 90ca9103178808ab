/* Walks panels, and rows four at a time. The including file defines panel_times(args, panel,
 * first_row, count, acc): acc (count, 16) = one panel times `count` rows (a constant, 1..4). */
#include "kernels/kernels.h"
#include "kernels/tile.h"

static inline __attribute__((always_inline)) void four_rows(const elm_matmul_args* args,
                                                            size_t panel, size_t first_row,
                                                            size_t count) {
  float acc[4][ELM_PANEL_ROWS] = {{0}};
  panel_times(args, panel, first_row, count, acc);
  for (size_t m = 0; m < count; ++m) {
    float* out = args->out + (first_row + m) * args->out_stride + panel * ELM_PANEL_ROWS;
    memcpy(out, acc[m], sizeof acc[m]);
  }
}

static void matmul(const elm_matmul_args* args) {
  for (size_t panel = args->first_panel; panel < args->last_panel; ++panel) {
    size_t row = 0;
    for (; row + 4 <= args->num_rows; row += 4) {
      four_rows(args, panel, row, 4);
    }
    switch (args->num_rows - row) {
      case 3: four_rows(args, panel, row, 3); break;
      case 2: four_rows(args, panel, row, 2); break;
      case 1: four_rows(args, panel, row, 1); break;
      default: break;
    }
  }
}
