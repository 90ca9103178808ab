#define ELM_NAME elm_glu_f32__avx512vnni
#include "kernels/glu_f32/glu_f32.inl"
