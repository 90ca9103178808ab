#define ELM_NAME elm_rmsnorm_f32__avx512vnni
#include "kernels/rmsnorm_f32/rmsnorm_f32.inl"
