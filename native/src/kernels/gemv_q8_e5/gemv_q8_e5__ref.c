#define ELM_FORMAT ELM_FORMAT_E5
#include "kernels/matmul/matmul_ref.inl"

void elm_gemv_q8_e5__ref(const elm_matmul_args* args) { matmul(args); }
