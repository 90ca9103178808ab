#define ELM_NAME elm_attention_q8__neon_dotprod
#include "kernels/attention_q8/attention_q8.inl"
