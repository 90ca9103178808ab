#define ELM_NAME elm_kv_store_q8__avx2
#include "kernels/kv_store_q8/kv_store_q8.inl"
