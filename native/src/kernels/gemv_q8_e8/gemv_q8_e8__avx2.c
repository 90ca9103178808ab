#include "kernels/matmul/e8_avx2.inl"

void elm_gemv_q8_e8__avx2(const elm_matmul_args* args) { matmul(args); }
