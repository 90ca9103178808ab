#include <immintrin.h>

#include "base/amx.h"
#include "base/peak/peak_i8.h"

uint64_t elm_peak_i8__amx(size_t rounds, int32_t* sum) {
  enum { SUMS = 4, ROWS = 16, BYTES = 64 };
  _Alignas(64) int32_t sums[ROWS][ROWS];
  elm_tile_config config = {.palette = 1};
  for (int i = 0; i < 8; ++i) {
    config.num_rows[i] = ROWS;
    config.row_bytes[i] = BYTES;
  }
  ELM_TILE_CONFIGURE(&config);
  for (size_t round = 0; round < rounds; ++round) {
    ELM_TILE_DOT(0, 4, 6);
    ELM_TILE_DOT(1, 4, 7);
    ELM_TILE_DOT(2, 5, 6);
    ELM_TILE_DOT(3, 5, 7);
  }
  ELM_TILE_STORE(0, sums, BYTES);
  ELM_TILE_RELEASE();
  *sum = sums[0][0];
  return (uint64_t)rounds * SUMS * ROWS * ROWS * BYTES;
}
