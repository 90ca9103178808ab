#define ELM_NAME elm_quant_q8__avx2
#include "kernels/quant_q8/quant_q8.inl"
