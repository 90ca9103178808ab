/* Where the parts of a weight tile lie; layout in ARCHITECTURE.md. E4 and E5 are grouped: their
 * codes have a scale and a zero point per group. */
#ifndef ELM_KERNELS_TILE_H
#define ELM_KERNELS_TILE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "edgellm/edgellm.h"
#include "kernels/kernels.h"

enum { ELM_LINE = 64 };

/* Columns of superblock s of a row of num_cols (a multiple of 32). */
static inline size_t elm_superblock_cols(size_t num_cols, size_t s) {
  const size_t left = num_cols - s * ELM_SUPERBLOCK;
  return left < ELM_SUPERBLOCK ? left : ELM_SUPERBLOCK;
}

/* Bytes of the codes of one group, 16 rows x 32 columns: a line for each bit of a code. */
static inline size_t elm_group_bytes(elm_format format) {
  const size_t code_bits = format == ELM_FORMAT_E4 ? 4 : format == ELM_FORMAT_E5 ? 5 : 8;
  return code_bits * ELM_LINE;
}
/* Bytes behind the codes of a tile: s, z (2 lines), D; of E8 only D. */
static inline size_t elm_scale_bytes(elm_format format) {
  return (format == ELM_FORMAT_E8 ? 1 : 4) * ELM_LINE;
}
/* Bytes of all codes of a tile of `cols` columns. */
static inline size_t elm_code_bytes(elm_format format, size_t cols) {
  return cols / ELM_GROUP * elm_group_bytes(format);
}
static inline size_t elm_tile_bytes(elm_format format, size_t cols) {
  return elm_code_bytes(format, cols) + elm_scale_bytes(format);
}
static inline size_t elm_panel_bytes(elm_format format, size_t num_cols) {
  const size_t num_superblocks = (num_cols + ELM_SUPERBLOCK - 1) / ELM_SUPERBLOCK;
  return elm_code_bytes(format, num_cols) + num_superblocks * elm_scale_bytes(format);
}

/* Scalar access to row r (0..15) of a tile of `cols` columns. */
static inline int32_t elm_code(elm_format format, const uint8_t* tile, size_t r, size_t k) {
  if (format == ELM_FORMAT_E8) {
    return (int8_t)tile[k / 4 * ELM_LINE + 4 * r + k % 4];
  }
  const uint8_t* at = tile + k / ELM_GROUP * elm_group_bytes(format) + 4 * r + k % 4;
  const size_t l = k % ELM_GROUP / 8, half = k % 8 / 4;
  const int32_t nibble = at[l * ELM_LINE] >> (4 * half) & 15;
  return format == ELM_FORMAT_E4 ? nibble : nibble | (at[4 * ELM_LINE] >> (l + 4 * half) & 1) << 4;
}
static inline int32_t elm_scale(elm_format format, const uint8_t* tile, size_t cols, size_t r,
                                size_t g) {
  uint32_t word;
  memcpy(&word, tile + elm_code_bytes(format, cols) + 4 * r, sizeof word);
  return (int32_t)(word >> (4 * g) & 15);
}
static inline int32_t elm_zero(elm_format format, const uint8_t* tile, size_t cols, size_t r,
                               size_t g) {
  return tile[elm_code_bytes(format, cols) + ELM_LINE * (1 + g / 4) + 4 * r + g % 4];
}
/* The integer that is multiplied by D. */
static inline int32_t elm_weight(elm_format format, const uint8_t* tile, size_t cols, size_t r,
                                 size_t k) {
  const int32_t code = elm_code(format, tile, r, k);
  return format == ELM_FORMAT_E8 ? code
                                 : elm_scale(format, tile, cols, r, k / ELM_GROUP) * code -
                                       elm_zero(format, tile, cols, r, k / ELM_GROUP);
}
static inline float elm_d(elm_format format, const uint8_t* tile, size_t cols, size_t r) {
  float d;
  memcpy(&d, tile + elm_tile_bytes(format, cols) - ELM_LINE + 4 * r, sizeof d);
  return d;
}

#endif
