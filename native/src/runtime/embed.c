#include "runtime/embed.h"

#include "kernels/tile.h"

void elm_embed_row(const elm_tensor* tensor, size_t row, float* x) {
  const elm_format format = tensor->format;
  const size_t true_cols = (size_t)tensor->cols;
  const size_t num_cols = (true_cols + ELM_GROUP - 1) / ELM_GROUP * ELM_GROUP;
  const uint8_t* panels = tensor->data;
  const uint8_t* tile = panels + row / ELM_PANEL_ROWS * elm_panel_bytes(format, num_cols);
  const size_t r = row % ELM_PANEL_ROWS;
  for (size_t first = 0; first < num_cols; first += ELM_SUPERBLOCK) {
    const size_t cols = elm_superblock_cols(num_cols, first / ELM_SUPERBLOCK);
    const size_t used = true_cols - first < cols ? true_cols - first : cols;
    const float d = elm_d(format, tile, cols, r);
    for (size_t k = 0; k < used; ++k) {
      x[first + k] = d * (float)elm_weight(format, tile, cols, r, k);
    }
    tile += elm_tile_bytes(format, cols);
  }
}
