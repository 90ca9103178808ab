#include "kernels/matmul/expand_e4_avx512.h"
#include "kernels/tile.h"

#define ELM_TILE_BYTES elm_e4_tile_bytes

static inline const float* expand_tile(const uint8_t* tile, size_t cols, uint8_t* out) {
  expand_e4(tile, cols, -128, out);
  return (const float*)(const void*)(tile + elm_e4_tile_bytes(cols) - ELM_LINE);
}

#include "kernels/matmul/gemm_avx512vnni.inl"

void elm_gemm_q8_e4__avx512vnni(const elm_matmul_args* args) { gemm(args); }
