#include "kernels/hadamard.inl"
#include "kernels/quantise.inl"

void ELM_NAME(const elm_kv_store_args* args) {
  const size_t n = args->n, slot = args->slot;
  float key[ELM_MAX_HEAD_DIM];
  int8_t q[ELM_MAX_HEAD_DIM];
  int8_t* keys = args->k_block;
  int8_t* values = args->v_block;

  memcpy(key, args->k, n * sizeof(float));
  hadamard(key, n);
  args->k_scale[slot] = quantise(key, n, q);
  for (size_t i = 0; i < n; i += 4) {
    memcpy(keys + i * ELM_KV_BLOCK + 4 * slot, q + i, 4);
  }
  args->v_scale[slot] = quantise(args->v, n, q);
  for (size_t i = 0; i < n; ++i) {
    values[slot / 4 * 4 * n + 4 * i + slot % 4] = q[i];
  }
}
