#define ELM_FORMAT ELM_FORMAT_E4
#include "kernels/matmul/gemm_grouped_avx2.inl"

void elm_gemm_q8_e4__avx2(const elm_matmul_args* args) { gemm(args); }
