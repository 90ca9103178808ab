#define ELM_FORMAT ELM_FORMAT_E4
#include "kernels/matmul/gemm_grouped_amx.inl"

void elm_gemm_q8_e4__amx(const elm_matmul_args* args) { gemm(args); }
