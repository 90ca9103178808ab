#define ELM_FORMAT ELM_FORMAT_E5
#include "kernels/matmul/gemm_grouped_amx.inl"

void elm_gemm_q8_e5__amx(const elm_matmul_args* args) { gemm(args); }
