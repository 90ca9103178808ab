#include "kernels/matmul/neon.h"

/* Lines as they lie in the file are paired on the way: E8 is the head's format, and a pass asks for
 * the logits of few rows, which would not read a rearranged copy often. */
static inline int8x16x2_t load_pairs(const uint8_t* lines, size_t v) {
  return pair_up(load_quarter(lines, v), load_quarter(lines + ELM_LINE, v));
}

#include "kernels/matmul/neon_i8mm.inl"
#include "kernels/matmul/e8_neon_int8.inl"

void elm_gemm_q8_e8__neon_i8mm(const elm_matmul_args* args) { matmul(args); }
