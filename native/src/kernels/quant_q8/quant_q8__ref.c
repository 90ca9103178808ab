#define ELM_NAME elm_quant_q8__ref
#include "kernels/quant_q8/quant_q8.inl"
