#include <immintrin.h>

#include "kernels/tile.h"

#define ELM_FORMAT ELM_FORMAT_E8

static inline void expand_tile(const uint8_t* tile, size_t cols, uint8_t* out) {
  const __m512i flip = _mm512_set1_epi8(-128);
  for (size_t l = 0; l < cols / 4; ++l) {
    const __m512i line = _mm512_load_si512(tile + l * ELM_LINE);
    _mm512_store_si512(out + l * ELM_LINE, _mm512_xor_si512(line, flip));
  }
}

#include "kernels/matmul/gemm_avx512vnni.inl"

void elm_gemm_q8_e8__avx512vnni(const elm_matmul_args* args) { gemm(args); }
