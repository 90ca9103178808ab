#define ELM_FORMAT ELM_FORMAT_E5
#include "kernels/matmul/gemv_grouped_avx512vnni.inl"

void elm_gemv_q8_e5__avx512vnni(const elm_matmul_args* args) { matmul(args); }
