#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/status.h"
#include "kernels/quantize/grouped_fit.h"
#include "kernels/tile.h"

/* Weights beyond this are taken for damage. */
#define MAX_WEIGHT 1e30F

static uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

uint64_t elm_tensor_bytes(elm_format format, uint64_t rows, uint64_t cols) {
  if (rows == 0 || cols == 0 || rows > INT32_MAX || cols > INT32_MAX) {
    return 0;
  }
  switch (format) {
    case ELM_FORMAT_F32: return rows * cols * sizeof(float); /* below 2^64 */
    case ELM_FORMAT_E4:
    case ELM_FORMAT_E5:
    case ELM_FORMAT_E8:
      return round_up(rows, ELM_PANEL_ROWS) / ELM_PANEL_ROWS *
             elm_panel_bytes(format, round_up(cols, ELM_GROUP));
  }
  return 0;
}

/* Writes row `r` of an E4 or E5 tile of zeros. Layout: ARCHITECTURE.md, "Arithmetic". */
static void pack_grouped_row(elm_format format, const elm_grouped_row* row, size_t r,
                             size_t num_groups, uint8_t* tile) {
  uint8_t* scales = tile + elm_code_bytes(format, num_groups * ELM_GROUP);
  uint8_t* offsets = scales + ELM_LINE;
  for (size_t k = 0; k < num_groups * ELM_GROUP; ++k) {
    uint8_t* at = tile + k / ELM_GROUP * elm_group_bytes(format) + 4 * r + k % 4;
    const size_t l = k % ELM_GROUP / 8, half = k % 8 / 4;
    at[l * ELM_LINE] |= (uint8_t)((row->codes[k] & 15U) << (4 * half));
    if (format == ELM_FORMAT_E5) {
      at[4 * ELM_LINE] |= (uint8_t)((unsigned)row->codes[k] >> 4 << (l + 4 * half));
    }
  }
  for (size_t g = 0; g < num_groups; ++g) {
    scales[4 * r + g / 2] |= (uint8_t)((unsigned)row->scale[g] << (4 * (g % 2)));
    offsets[g / 4 * ELM_LINE + 4 * r + g % 4] = row->offset[g];
  }
  memcpy(offsets + (size_t)2 * ELM_LINE + 4 * r, &row->d, sizeof row->d);
}

static void pack_e8_row(const float* weights, size_t r, size_t cols, uint8_t* tile) {
  float amax = 0.0F;
  for (size_t k = 0; k < cols; ++k) {
    amax = fmaxf(amax, fabsf(weights[k]));
  }
  const float d = amax > 0.0F ? fmaxf(amax / 127.0F, FLT_MIN) : 1.0F;
  for (size_t k = 0; k < cols; ++k) {
    const float magic = 12582912.0F; /* 1.5 * 2^23: adding it rounds to an integer */
    const int8_t code = (int8_t)((weights[k] / d + magic) - magic);
    memcpy(tile + k / 4 * ELM_LINE + 4 * r + k % 4, &code, sizeof code);
  }
  memcpy(tile + cols / 4 * ELM_LINE + 4 * r, &d, sizeof d);
}

/* Importance of the columns of a superblock, at most 1; 1 each if `importance` is NULL. */
static void scale_importance(const float* importance, size_t num_real, float* out) {
  float largest = 0.0F;
  for (size_t i = 0; importance != NULL && i < num_real; ++i) {
    largest = fmaxf(largest, importance[i]);
  }
  for (size_t i = 0; i < ELM_SUPERBLOCK; ++i) {
    const bool is_given = largest > 0.0F && i < num_real;
    out[i] = is_given ? importance[i] / largest : 1.0F;
  }
}

/* Row `r` of a tile of `cols` columns, of which the first `num_real` exist. */
static void quantize_row(elm_format format, const float* weights, const float* importance,
                         size_t num_real, size_t r, size_t cols, uint8_t* tile) {
  float padded[ELM_SUPERBLOCK] = {0.0F};
  memcpy(padded, weights, num_real * sizeof(float));
  if (format == ELM_FORMAT_E8) {
    pack_e8_row(padded, r, cols, tile);
  } else {
    elm_grouped_row row;
    elm_grouped_fit(format, padded, importance, cols / ELM_GROUP, &row);
    pack_grouped_row(format, &row, r, cols / ELM_GROUP, tile);
  }
}

/* One panel of `num_rows` (up to 16) rows x `cols` columns; row-major weights. */
static void quantize_panel(elm_format format, const float* weights, const float* importance,
                           size_t num_rows, size_t cols, uint8_t* panel) {
  static const elm_grouped_row past_the_end = {.scale = {1, 1, 1, 1, 1, 1, 1, 1}};
  const size_t padded = (size_t)round_up(cols, ELM_GROUP);
  memset(panel, 0, elm_panel_bytes(format, padded));
  for (size_t first = 0; first < padded; first += ELM_SUPERBLOCK) {
    const size_t tile_cols = elm_superblock_cols(padded, first / ELM_SUPERBLOCK);
    const size_t num_real = cols - first < tile_cols ? cols - first : tile_cols;
    uint8_t* tile = panel + elm_panel_bytes(format, first);
    float scaled[ELM_SUPERBLOCK];
    scale_importance(importance == NULL ? NULL : importance + first, num_real, scaled);
    for (size_t r = 0; r < num_rows; ++r) {
      quantize_row(format, weights + r * cols + first, scaled, num_real, r, tile_cols, tile);
    }
    for (size_t r = num_rows; format != ELM_FORMAT_E8 && r < ELM_PANEL_ROWS; ++r) {
      pack_grouped_row(format, &past_the_end, r, tile_cols / ELM_GROUP, tile);
    }
  }
}

elm_status elm_quantize(elm_format format, const float* weights, const float* importance,
                        uint64_t first_row, uint64_t num_rows, uint64_t rows, uint64_t cols,
                        void* out, elm_error* error) {
  const elm_status invalid = ELM_STATUS_INVALID_ARGUMENT;
  const uint64_t stride = elm_panel_bytes(format, round_up(cols, ELM_GROUP));
  if (format != ELM_FORMAT_E4 && format != ELM_FORMAT_E5 && format != ELM_FORMAT_E8) {
    return elm_fail(error, invalid, "cannot quantise to format %d: give E4, E5 or E8", (int)format);
  }
  if (weights == NULL || out == NULL) {
    return elm_fail(error, invalid, "weights or out is NULL");
  }
  if (elm_tensor_bytes(format, rows, cols) == 0) {
    return elm_fail(error, invalid, "a tensor of %" PRIu64 " x %" PRIu64 " is not representable",
                    rows, cols);
  }
  if (first_row % ELM_PANEL_ROWS != 0 || first_row > rows || num_rows > rows - first_row ||
      (num_rows % ELM_PANEL_ROWS != 0 && first_row + num_rows != rows)) {
    return elm_fail(error, invalid,
                    "rows %" PRIu64 " to %" PRIu64 " of %" PRIu64
                    " cannot be quantised alone: cut at multiples of %d",
                    first_row, first_row + num_rows, rows, (int)ELM_PANEL_ROWS);
  }
  for (uint64_t i = 0; i < num_rows * cols; ++i) {
    if (!(fabsf(weights[i]) <= MAX_WEIGHT)) {
      return elm_fail(error, invalid,
                      "weight at row %" PRIu64 ", column %" PRIu64
                      " is %g: it must be a number up to 1e30",
                      first_row + i / cols, i % cols, (double)weights[i]);
    }
  }
  for (uint64_t i = 0; importance != NULL && i < cols; ++i) {
    if (!(importance[i] >= 0.0F && importance[i] <= MAX_WEIGHT)) {
      return elm_fail(error, invalid,
                      "importance of column %" PRIu64 " is %g: it must be within 0 to 1e30", i,
                      (double)importance[i]);
    }
  }
  for (uint64_t done = 0; done < num_rows; done += ELM_PANEL_ROWS) {
    const uint64_t rest = num_rows - done;
    quantize_panel(format, weights + done * cols, importance,
                   rest < ELM_PANEL_ROWS ? rest : ELM_PANEL_ROWS, cols,
                   (uint8_t*)out + (first_row + done) / ELM_PANEL_ROWS * stride);
  }
  return ELM_STATUS_OK;
}
