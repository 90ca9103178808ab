#include "kernels/matmul/e8_neon.inl"

void elm_gemm_q8_e8__neon(const elm_matmul_args* args) { matmul(args); }
