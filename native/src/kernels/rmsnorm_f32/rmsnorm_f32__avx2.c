#define ELM_NAME elm_rmsnorm_f32__avx2
#include "kernels/rmsnorm_f32/rmsnorm_f32.inl"
