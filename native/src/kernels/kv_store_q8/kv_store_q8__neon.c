#define ELM_NAME elm_kv_store_q8__neon
#include "kernels/kv_store_q8/kv_store_q8.inl"
