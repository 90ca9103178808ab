#define ELM_NAME elm_kv_store_f16__avx2
#include "kernels/kv_store_f16/kv_store_f16.inl"
