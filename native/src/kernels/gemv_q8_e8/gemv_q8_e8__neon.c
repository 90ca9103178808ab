#include "kernels/matmul/e8_neon.inl"

void elm_gemv_q8_e8__neon(const elm_matmul_args* args) { matmul(args); }
