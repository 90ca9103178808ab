#define ELM_FORMAT ELM_FORMAT_E5
#include "kernels/matmul/gemm_grouped_neon_i8mm.inl"

void elm_gemm_q8_e5__neon_i8mm(const elm_matmul_args* args) { gemm(args); }
