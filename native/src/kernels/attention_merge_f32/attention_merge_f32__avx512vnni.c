#define ELM_NAME elm_attention_merge_f32__avx512vnni
#include "kernels/attention_merge_f32/attention_merge_f32.inl"
