#define ELM_TILE_BYTES elm_e4_tile_bytes
#define ELM_WEIGHT(tile, cols, r, k)                                        \
  (elm_e4_scale(tile, cols, r, (k) / ELM_GROUP) * elm_e4_code(tile, r, k) - \
   elm_e4_zero(tile, cols, r, (k) / ELM_GROUP))
#define ELM_D elm_e4_d
#include "kernels/matmul/matmul_ref.inl"

void elm_gemv_q8_e4__ref(const elm_matmul_args* args) { matmul(args); }
