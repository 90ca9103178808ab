#define ELM_FORMAT ELM_FORMAT_E5
#include "kernels/matmul/grouped_neon.inl"

void elm_gemm_q8_e5__neon(const elm_matmul_args* args) { matmul(args); }
