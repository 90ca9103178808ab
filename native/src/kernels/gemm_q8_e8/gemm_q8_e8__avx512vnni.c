#include <immintrin.h>

#include "kernels/tile.h"

#define ELM_TILE_BYTES elm_e8_tile_bytes

static inline const float* expand_tile(const uint8_t* tile, size_t cols, uint8_t* out) {
  const __m512i flip = _mm512_set1_epi8(-128);
  for (size_t l = 0; l < cols / 4; ++l) {
    const __m512i line = _mm512_load_si512(tile + l * ELM_LINE);
    _mm512_store_si512(out + l * ELM_LINE, _mm512_xor_si512(line, flip));
  }
  return (const float*)(const void*)(tile + cols / 4 * ELM_LINE);
}

#include "kernels/matmul/gemm_avx512vnni.inl"

void elm_gemm_q8_e8__avx512vnni(const elm_matmul_args* args) { gemm(args); }
