#include "runtime/embed.h"

#include "kernels/tile.h"

void elm_embed_row(const elm_tensor* tensor, size_t row, float scale, float* x) {
  const bool is_e4 = tensor->format == ELM_FORMAT_E4;
  const size_t true_cols = (size_t)tensor->cols;
  const size_t num_cols = (true_cols + ELM_GROUP - 1) / ELM_GROUP * ELM_GROUP;
  const size_t panel_bytes = is_e4 ? elm_e4_panel_bytes(num_cols) : elm_e8_panel_bytes(num_cols);
  const uint8_t* tile = (const uint8_t*)tensor->data + row / ELM_PANEL_ROWS * panel_bytes;
  const size_t r = row % ELM_PANEL_ROWS;
  for (size_t first = 0; first < num_cols; first += ELM_SUPERBLOCK) {
    const size_t cols = elm_superblock_cols(num_cols, first / ELM_SUPERBLOCK);
    const size_t used = true_cols - first < cols ? true_cols - first : cols;
    if (is_e4) {
      const float d = elm_e4_d(tile, cols, r);
      for (size_t k = 0; k < used; ++k) {
        const int32_t w = elm_e4_scale(tile, cols, r, k / ELM_GROUP) * elm_e4_code(tile, r, k) -
                          elm_e4_zero(tile, cols, r, k / ELM_GROUP);
        x[first + k] = d * (float)w * scale;
      }
      tile += elm_e4_tile_bytes(cols);
    } else {
      const float d = elm_e8_d(tile, cols, r);
      for (size_t k = 0; k < used; ++k) {
        x[first + k] = d * (float)elm_e8_code(tile, r, k) * scale;
      }
      tile += elm_e8_tile_bytes(cols);
    }
  }
}
