#define ELM_FORMAT ELM_FORMAT_E5
#include "kernels/matmul/gemm_grouped_neon_dotprod.inl"

void elm_gemm_q8_e5__neon_dotprod(const elm_matmul_args* args) { gemm(args); }
