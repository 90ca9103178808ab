#define ELM_FORMAT ELM_FORMAT_E4
#include "kernels/matmul/matmul_ref.inl"

void elm_gemv_q8_e4__ref(const elm_matmul_args* args) { matmul(args); }
