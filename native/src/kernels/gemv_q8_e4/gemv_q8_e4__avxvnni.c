#define ELM_FORMAT ELM_FORMAT_E4
#include "kernels/matmul/gemv_grouped_avxvnni.inl"

void elm_gemv_q8_e4__avxvnni(const elm_matmul_args* args) { matmul(args); }
