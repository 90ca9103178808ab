#include <float.h>
#include <math.h>
#include <string.h>

#include "base/status.h"
#include "kernels/quantize/e4_fit.h"

enum { PANEL = 16, LINE = 64, E4_SCALE_LINES = 4 };

/* Weights beyond this are taken for damage. */
#define MAX_WEIGHT 1e30F

static uint64_t round_up(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/* Bytes of 16 rows x `cols` columns (a multiple of 32). */
static uint64_t panel_bytes(elm_format format, uint64_t cols) {
  const uint64_t num_superblocks = round_up(cols, ELM_SUPERBLOCK_COLS) / ELM_SUPERBLOCK_COLS;
  return format == ELM_FORMAT_E4 ? (cols / 8 + num_superblocks * E4_SCALE_LINES) * LINE
                                 : (cols / 4 + num_superblocks) * LINE;
}

uint64_t elm_tensor_bytes(elm_format format, uint64_t rows, uint64_t cols) {
  uint64_t bytes;
  if (rows == 0 || cols == 0 || rows > INT32_MAX || cols > INT32_MAX) {
    return 0;
  }
  switch (format) {
    case ELM_FORMAT_F32:
      return elm_checked_mul(rows * cols, sizeof(float), &bytes) ? bytes : 0;
    case ELM_FORMAT_E4:
    case ELM_FORMAT_E8:
      return round_up(rows, PANEL) / PANEL * panel_bytes(format, round_up(cols, ELM_GROUP_COLS));
  }
  return 0;
}

/* Writes row `r` of an E4 tile. Layout: ARCHITECTURE.md, "Arithmetic". */
static void pack_e4_row(const elm_e4_row* row, size_t r, size_t num_groups, uint8_t* tile) {
  uint8_t* scales = tile + num_groups * (ELM_GROUP_COLS / 8) * LINE;
  uint8_t* offsets = scales + LINE;
  for (size_t k = 0; k < num_groups * ELM_GROUP_COLS; k += 8) {
    for (size_t j = 0; j < 4; ++j) {
      tile[k / 8 * LINE + 4 * r + j] =
          (uint8_t)(row->codes[k + j] | (unsigned)row->codes[k + 4 + j] << 4);
    }
  }
  for (size_t g = 0; g < num_groups; ++g) {
    scales[4 * r + g / 2] |= (uint8_t)((unsigned)row->scale[g] << (4 * (g % 2)));
    offsets[g / 4 * LINE + 4 * r + g % 4] = row->offset[g];
  }
  memcpy(offsets + 2 * LINE + 4 * r, &row->d, sizeof row->d);
}

static void pack_e8_row(const float* weights, size_t r, size_t cols, uint8_t* tile) {
  float amax = 0.0F;
  float d;
  for (size_t k = 0; k < cols; ++k) {
    amax = fabsf(weights[k]) > amax ? fabsf(weights[k]) : amax;
  }
  d = amax / 127.0F;
  d = amax == 0.0F ? 1.0F : d > FLT_MIN ? d : FLT_MIN;
  for (size_t k = 0; k < cols; ++k) {
    const float magic = 12582912.0F; /* 1.5 * 2^23: adding it rounds to an integer */
    const int8_t code = (int8_t)((weights[k] / d + magic) - magic);
    memcpy(tile + k / 4 * LINE + 4 * r + k % 4, &code, sizeof code);
  }
  memcpy(tile + cols / 4 * LINE + 4 * r, &d, sizeof d);
}

/* `num_rows` (up to 16) rows x `cols` columns of weights into one panel, which is cleared before.
 */
static void quantize_panel(elm_format format, const float* weights, uint64_t num_rows,
                           uint64_t cols, uint8_t* panel) {
  const uint64_t padded = round_up(cols, ELM_GROUP_COLS);
  memset(panel, 0, (size_t)panel_bytes(format, padded));
  for (uint64_t first = 0; first < padded; first += ELM_SUPERBLOCK_COLS) {
    const uint64_t rest = padded - first;
    const size_t tile_cols = rest < ELM_SUPERBLOCK_COLS ? (size_t)rest : ELM_SUPERBLOCK_COLS;
    const size_t num_groups = tile_cols / ELM_GROUP_COLS;
    const size_t real_cols = cols - first < tile_cols ? (size_t)(cols - first) : tile_cols;
    uint8_t* tile = panel + panel_bytes(format, first);
    for (size_t r = 0; r < PANEL; ++r) {
      float row[ELM_SUPERBLOCK_COLS] = {0.0F};
      elm_e4_row fitted = {.scale = {1, 1, 1, 1, 1, 1, 1, 1}}; /* of a row past the end */
      if (r < num_rows) {
        memcpy(row, weights + r * cols + first, real_cols * sizeof(float));
      }
      if (format == ELM_FORMAT_E8) {
        if (r < num_rows) {
          pack_e8_row(row, r, tile_cols, tile);
        }
        continue;
      }
      if (r < num_rows) {
        elm_e4_fit(row, num_groups, &fitted);
      }
      pack_e4_row(&fitted, r, num_groups, tile);
    }
  }
}

elm_status elm_quantize(elm_format format, const float* weights, uint64_t first_row,
                        uint64_t num_rows, uint64_t rows, uint64_t cols, void* out,
                        elm_error* error) {
  const elm_status invalid = ELM_STATUS_INVALID_ARGUMENT;
  const uint64_t stride = panel_bytes(format, round_up(cols, ELM_GROUP_COLS));
  if (format != ELM_FORMAT_E4 && format != ELM_FORMAT_E8) {
    return elm_fail(error, invalid, "cannot quantise to format %d: give E4 or E8", (int)format);
  }
  if (weights == NULL || out == NULL) {
    return elm_fail(error, invalid, "weights or out is NULL");
  }
  if (elm_tensor_bytes(format, rows, cols) == 0) {
    return elm_fail(error, invalid, "a tensor of %llu x %llu is not representable",
                    (unsigned long long)rows, (unsigned long long)cols);
  }
  if (first_row % PANEL != 0 || first_row > rows || num_rows > rows - first_row ||
      (num_rows % PANEL != 0 && first_row + num_rows != rows)) {
    return elm_fail(error, invalid,
                    "rows %llu to %llu of %llu cannot be quantised alone: cut at multiples of %d",
                    (unsigned long long)first_row, (unsigned long long)(first_row + num_rows),
                    (unsigned long long)rows, (int)PANEL);
  }
  for (uint64_t i = 0; i < num_rows * cols; ++i) {
    if (!(fabsf(weights[i]) <= MAX_WEIGHT)) {
      return elm_fail(error, invalid,
                      "weight at row %llu, column %llu is %g: it must be a number up to 1e30",
                      (unsigned long long)(first_row + i / cols), (unsigned long long)(i % cols),
                      (double)weights[i]);
    }
  }
  for (uint64_t done = 0; done < num_rows; done += PANEL) {
    const uint64_t rest = num_rows - done;
    quantize_panel(format, weights + done * cols, rest < PANEL ? rest : PANEL, cols,
                   (uint8_t*)out + (first_row + done) / PANEL * stride);
  }
  return ELM_STATUS_OK;
}
