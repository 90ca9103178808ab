#define ELM_NAME elm_attention_q8__neon
#include "kernels/attention_q8/attention_q8.inl"
