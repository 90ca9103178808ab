#include "kernels/matmul/e4_neon.inl"

void elm_gemm_q8_e4__neon(const elm_matmul_args* args) { matmul(args); }
