#define ELM_FORMAT ELM_FORMAT_E4
#include "kernels/matmul/gemm_grouped_avxvnni.inl"

void elm_gemm_q8_e4__avxvnni(const elm_matmul_args* args) { gemm(args); }
