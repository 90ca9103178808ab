#define ELM_FORMAT ELM_FORMAT_E4
#include "kernels/matmul/gemv_grouped_neon_dotprod.inl"

void elm_gemv_q8_e4__neon_dotprod(const elm_matmul_args* args) { matmul(args); }
