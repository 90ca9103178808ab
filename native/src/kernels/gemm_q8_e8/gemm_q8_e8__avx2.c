#include "kernels/matmul/e8_avx2.inl"

void elm_gemm_q8_e8__avx2(const elm_matmul_args* args) { matmul(args); }
