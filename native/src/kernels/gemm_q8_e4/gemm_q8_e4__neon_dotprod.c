#define ELM_FORMAT ELM_FORMAT_E4
#include "kernels/matmul/gemm_grouped_neon_dotprod.inl"

void elm_gemm_q8_e4__neon_dotprod(const elm_matmul_args* args) { gemm(args); }
