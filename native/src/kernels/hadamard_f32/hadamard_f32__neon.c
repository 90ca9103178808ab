#define ELM_NAME elm_hadamard_f32__neon
#include "kernels/hadamard_f32/hadamard_f32.inl"
