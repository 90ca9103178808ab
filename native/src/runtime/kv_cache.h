/* The KV cache: float16, per layer and key/value head in blocks of 32 tokens. The only file that
 * knows where a block lies. */
#ifndef ELM_RUNTIME_KV_CACHE_H
#define ELM_RUNTIME_KV_CACHE_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"

typedef struct elm_kv_cache {
  uint16_t* memory;
  size_t num_layers;
  size_t num_heads;
  size_t head_dim;
  size_t num_blocks; /* per head */
} elm_kv_cache;

/* float16 numbers of the keys (or the values) of one head. */
static inline size_t elm_kv_plane(const elm_kv_cache* cache) {
  return cache->num_blocks * ELM_KV_BLOCK * cache->head_dim;
}
/* Keys of a head: blocks of (head_dim, 32 tokens). */
static inline uint16_t* elm_kv_keys(const elm_kv_cache* cache, size_t layer, size_t head) {
  return cache->memory + (layer * cache->num_heads + head) * 2 * elm_kv_plane(cache);
}
/* Values of a head: blocks of (32 tokens, head_dim). */
static inline uint16_t* elm_kv_values(const elm_kv_cache* cache, size_t layer, size_t head) {
  return elm_kv_keys(cache, layer, head) + elm_kv_plane(cache);
}

#endif
