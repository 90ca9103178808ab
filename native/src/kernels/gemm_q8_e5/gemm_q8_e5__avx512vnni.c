#define ELM_FORMAT ELM_FORMAT_E5
#include "kernels/matmul/gemm_grouped_avx512vnni.inl"

void elm_gemm_q8_e5__avx512vnni(const elm_matmul_args* args) { gemm(args); }
