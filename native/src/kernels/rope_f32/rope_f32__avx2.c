#define ELM_NAME elm_rope_f32__avx2
#include "kernels/rope_f32/rope_f32.inl"
