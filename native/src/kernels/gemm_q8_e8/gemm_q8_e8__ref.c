#define ELM_TILE_BYTES elm_e8_tile_bytes
#define ELM_WEIGHT(tile, cols, r, k) elm_e8_code(tile, r, k)
#define ELM_D elm_e8_d
#include "kernels/matmul/matmul_ref.inl"

void elm_gemm_q8_e8__ref(const elm_matmul_args* args) { matmul(args); }
