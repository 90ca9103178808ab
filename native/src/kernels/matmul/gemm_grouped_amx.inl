/* Products of E4 and E5 weights for AMX; the including file defines ELM_FORMAT. */
#include "kernels/matmul/grouped_avx512.h"

static inline const uint8_t* weights_of(const uint8_t* tile, size_t cols, uint8_t* buffer) {
  expand_grouped(ELM_FORMAT, tile, cols, 0, buffer);
  return buffer;
}

#include "kernels/matmul/gemm_amx.inl"
