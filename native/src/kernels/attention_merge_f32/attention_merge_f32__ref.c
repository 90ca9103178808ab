#define ELM_NAME elm_attention_merge_f32__ref
#include "kernels/attention_merge_f32/attention_merge_f32.inl"
