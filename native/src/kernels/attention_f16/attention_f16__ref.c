#define ELM_NAME elm_attention_f16__ref
#include "kernels/attention_f16/attention_f16.inl"
