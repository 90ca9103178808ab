/* AMX tiles in C, in place of the instructions of base/amx.h; what those refuse, aborts. */
#ifndef ELM_TESTS_EMULATED_TILES_H
#define ELM_TESTS_EMULATED_TILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct emulated_tile {
  uint8_t rows[16][64];
} emulated_tile;

static struct {
  bool is_configured;
  uint8_t num_rows[8];
  uint16_t row_bytes[8];
  emulated_tile tiles[8];
} emulated;

static inline void require(bool condition) {
  if (!condition) {
    abort();
  }
}

static inline void emulate_configure(const void* config) {
  const uint8_t* bytes = config;
  static const uint8_t zeros[64];
  require(bytes[0] == 1 && memcmp(bytes + 1, zeros, 15) == 0);
  require(memcmp(bytes + 32, zeros, 16) == 0 && memcmp(bytes + 56, zeros, 8) == 0);
  memcpy(emulated.row_bytes, bytes + 16, sizeof emulated.row_bytes);
  memcpy(emulated.num_rows, bytes + 48, sizeof emulated.num_rows);
  memset(emulated.tiles, 0, sizeof emulated.tiles);
  for (int i = 0; i < 8; ++i) {
    require(emulated.num_rows[i] <= 16 && emulated.row_bytes[i] <= 64);
    require((emulated.num_rows[i] == 0) == (emulated.row_bytes[i] == 0));
  }
  emulated.is_configured = true;
}

static inline void emulate_release(void) { emulated.is_configured = false; }

static inline emulated_tile* tile_of(int tile) {
  require(emulated.is_configured && emulated.num_rows[tile] > 0);
  return &emulated.tiles[tile];
}

static inline void emulate_zero(int tile) { memset(tile_of(tile), 0, sizeof(emulated_tile)); }

static inline void emulate_load(int tile, const uint8_t* from, size_t stride) {
  emulate_zero(tile);
  for (size_t r = 0; r < emulated.num_rows[tile]; ++r) {
    memcpy(tile_of(tile)->rows[r], from + r * stride, emulated.row_bytes[tile]);
  }
}

static inline void emulate_store(int tile, uint8_t* to, size_t stride) {
  for (size_t r = 0; r < emulated.num_rows[tile]; ++r) {
    memcpy(to + r * stride, tile_of(tile)->rows[r], emulated.row_bytes[tile]);
  }
}

static inline void emulate_dot(int c, int a, int b) {
  require(emulated.num_rows[c] == emulated.num_rows[a]);
  require(emulated.row_bytes[c] == emulated.row_bytes[b]);
  require(emulated.row_bytes[a] == 4 * emulated.num_rows[b]);
  for (size_t m = 0; m < emulated.num_rows[c]; ++m) {
    for (size_t n = 0; n < emulated.row_bytes[c] / 4u; ++n) {
      int32_t sum;
      memcpy(&sum, tile_of(c)->rows[m] + 4 * n, sizeof sum);
      for (size_t k = 0; k < emulated.row_bytes[a]; ++k) {
        sum += (int8_t)tile_of(a)->rows[m][k] * (int8_t)tile_of(b)->rows[k / 4][4 * n + k % 4];
      }
      memcpy(tile_of(c)->rows[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

#define ELM_TILE_CONFIGURE(config) emulate_configure(config)
#define ELM_TILE_RELEASE() emulate_release()
#define ELM_TILE_ZERO(tile) emulate_zero(tile)
#define ELM_TILE_LOAD(tile, from, stride) emulate_load(tile, (const uint8_t*)(from), stride)
#define ELM_TILE_STORE(tile, to, stride) emulate_store(tile, (uint8_t*)(to), stride)
#define ELM_TILE_DOT(c, a, b) emulate_dot(c, a, b)

#endif
