#define ELM_NAME elm_rope_f32__neon
#include "kernels/rope_f32/rope_f32.inl"
