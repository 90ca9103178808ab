/* Where the parts of a weight tile lie; layout in ARCHITECTURE.md. */
#ifndef ELM_KERNELS_TILE_H
#define ELM_KERNELS_TILE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kernels.h"

enum { ELM_LINE = 64 };

/* Columns of superblock s of a row of num_cols (a multiple of 32). */
static inline size_t elm_superblock_cols(size_t num_cols, size_t s) {
  const size_t left = num_cols - s * ELM_SUPERBLOCK;
  return left < ELM_SUPERBLOCK ? left : ELM_SUPERBLOCK;
}

/* Bytes of a tile of `cols` columns. E4: codes, s, z (2 lines), D. E8: codes, D. */
static inline size_t elm_e4_tile_bytes(size_t cols) { return cols / 8 * ELM_LINE + 4 * ELM_LINE; }
static inline size_t elm_e8_tile_bytes(size_t cols) { return cols / 4 * ELM_LINE + ELM_LINE; }

/* Bytes of a whole panel. */
static inline size_t elm_e4_panel_bytes(size_t num_cols) {
  const size_t num_superblocks = (num_cols + ELM_SUPERBLOCK - 1) / ELM_SUPERBLOCK;
  return num_cols / 8 * ELM_LINE + num_superblocks * 4 * ELM_LINE;
}
static inline size_t elm_e8_panel_bytes(size_t num_cols) {
  const size_t num_superblocks = (num_cols + ELM_SUPERBLOCK - 1) / ELM_SUPERBLOCK;
  return num_cols / 4 * ELM_LINE + num_superblocks * ELM_LINE;
}

/* Scalar access to row r (0..15) of an E4 tile of `cols` columns. */
static inline int32_t elm_e4_code(const uint8_t* tile, size_t r, size_t k) {
  const uint8_t byte = tile[k / 8 * ELM_LINE + 4 * r + k % 4];
  return k % 8 < 4 ? byte & 15 : byte >> 4;
}
static inline int32_t elm_e4_scale(const uint8_t* tile, size_t cols, size_t r, size_t g) {
  uint32_t word;
  memcpy(&word, tile + cols / 8 * ELM_LINE + 4 * r, sizeof word);
  return (int32_t)(word >> (4 * g) & 15);
}
static inline int32_t elm_e4_zero(const uint8_t* tile, size_t cols, size_t r, size_t g) {
  return tile[cols / 8 * ELM_LINE + ELM_LINE * (1 + g / 4) + 4 * r + g % 4];
}
static inline float elm_e4_d(const uint8_t* tile, size_t cols, size_t r) {
  float d;
  memcpy(&d, tile + cols / 8 * ELM_LINE + 3 * ELM_LINE + 4 * r, sizeof d);
  return d;
}
/* The same for E8. */
static inline int32_t elm_e8_code(const uint8_t* tile, size_t r, size_t k) {
  return (int8_t)tile[k / 4 * ELM_LINE + 4 * r + k % 4];
}
static inline float elm_e8_d(const uint8_t* tile, size_t cols, size_t r) {
  float d;
  memcpy(&d, tile + cols / 4 * ELM_LINE + 4 * r, sizeof d);
  return d;
}

#endif
