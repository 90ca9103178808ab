/* The KV cache: per layer and key/value head, keys and values in blocks of 32 tokens, in the layout
 * that elm_kv_store_args describes. The only file that knows where a block lies. */
#ifndef ELM_RUNTIME_KV_CACHE_H
#define ELM_RUNTIME_KV_CACHE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

typedef struct elm_kv_cache {
  uint8_t* memory;
  bool is_int8; /* else float16 */
  size_t num_layers;
  size_t num_heads;
  size_t head_dim;
  size_t num_blocks; /* per head */
} elm_kv_cache;

/* One head of one layer. */
typedef struct elm_kv_head {
  uint8_t* keys;
  uint8_t* values;
  float* k_scale; /* (tokens); NULL for float16 */
  float* v_scale;
} elm_kv_head;

/* Bytes of one token's key or value, without its scale. */
static inline size_t elm_kv_token_bytes(const elm_kv_cache* cache) {
  return cache->head_dim * (cache->is_int8 ? 1 : sizeof(uint16_t));
}

static inline size_t elm_kv_head_bytes(const elm_kv_cache* cache) {
  const size_t scales = cache->is_int8 ? sizeof(float) : 0;
  return cache->num_blocks * ELM_KV_BLOCK * 2 * (elm_kv_token_bytes(cache) + scales);
}

static inline elm_kv_head elm_kv_head_at(const elm_kv_cache* cache, size_t layer, size_t head) {
  const size_t tokens = cache->num_blocks * ELM_KV_BLOCK;
  const size_t plane = tokens * elm_kv_token_bytes(cache);
  elm_kv_head at = {0};
  at.keys = cache->memory + (layer * cache->num_heads + head) * elm_kv_head_bytes(cache);
  at.values = at.keys + plane;
  if (cache->is_int8) {
    at.k_scale = (float*)(void*)(at.values + plane);
    at.v_scale = at.k_scale + tokens;
  }
  return at;
}

#endif
