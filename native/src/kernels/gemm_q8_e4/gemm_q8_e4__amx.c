#include "kernels/matmul/expand_e4_avx512.h"
#include "kernels/tile.h"

#define ELM_TILE_BYTES elm_e4_tile_bytes

static inline const uint8_t* weights_of(const uint8_t* tile, size_t cols, uint8_t* buffer) {
  expand_e4(tile, cols, 0, buffer);
  return buffer;
}

#include "kernels/matmul/gemm_amx.inl"

void elm_gemm_q8_e4__amx(const elm_matmul_args* args) { gemm(args); }
