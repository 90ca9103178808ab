#include "kernels/matmul/e8_avxvnni.inl"

void elm_gemm_q8_e8__avxvnni(const elm_matmul_args* args) { matmul(args); }
