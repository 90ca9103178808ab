#define ELM_NAME elm_quant_q8__avx512vnni
#include "kernels/quant_q8/quant_q8.inl"
