#include "kernels/matmul/neon_dotprod.h"

#include "kernels/matmul/e8_neon_int8.inl"

void elm_gemv_q8_e8__neon_dotprod(const elm_matmul_args* args) { matmul(args); }
