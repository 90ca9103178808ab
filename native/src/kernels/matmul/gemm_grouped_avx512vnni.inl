/* Products of E4 and E5 weights for AVX-512 VNNI; the including file defines ELM_FORMAT. */
#include "kernels/matmul/grouped_avx512.h"

static inline void expand_tile(const uint8_t* tile, size_t cols, uint8_t* out) {
  expand_grouped(ELM_FORMAT, tile, cols, -128, out);
}

#include "kernels/matmul/gemm_avx512vnni.inl"
