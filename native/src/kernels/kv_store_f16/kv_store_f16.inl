#include "kernels/kernels.h"
#include "kernels/simd.h"

static inline f16v saturate(f16v x) { return v_max(v_set(-65504.0f), v_min(v_set(65504.0f), x)); }

void ELM_NAME(const elm_kv_store_args* args) {
  uint16_t* key_block = args->k_block;
  uint16_t* value = (uint16_t*)args->v_block + args->slot * args->n;
  for (size_t i = 0; i < args->n; i += 16) {
    uint16_t key[16];
    v_store_half(key, saturate(v_load(args->k + i)));
    for (size_t j = 0; j < 16; ++j) {
      key_block[(i + j) * ELM_KV_BLOCK + args->slot] = key[j];
    }
    v_store_half(value + i, saturate(v_load(args->v + i)));
  }
}
