/* What attention over every kind of cache shares: softmax of a block, merge of blocks. */
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/simd.h"

/* GCC leaves loops over a tile rolled otherwise, and their accumulators in memory. */
#define ELM_UNROLL _Pragma("GCC unroll 8")

/* The running (max, sum, out) of the queries in a tile. */
typedef struct tile_state {
  float max[ELM_QUERY_TILE];
  float sum[ELM_QUERY_TILE];
  float* out[ELM_QUERY_TILE];
} tile_state;

/* Turns a query's scores into probabilities relative to the maximum of [first, last). */
static inline void soften(float* scores, size_t first, size_t last, float* max, float* sum) {
  for (size_t j = 0; j < first; ++j) {
    scores[j] = -INFINITY;
  }
  for (size_t j = last; j < ELM_KV_BLOCK; ++j) {
    scores[j] = -INFINITY;
  }
  const f16v low = v_load(scores), high = v_load(scores + 16);
  *max = v_reduce_max(v_max(low, high));
  const f16v negative_max = v_set(-*max);
  const f16v p_low = v_exp(v_add(low, negative_max));
  const f16v p_high = v_exp(v_add(high, negative_max));
  *sum = v_reduce_add(v_add(p_low, p_high));
  v_store(scores, p_low);
  v_store(scores + 16, p_high);
}

/* Merges a block's (max, sum, o) of the queries that have tokens in it into the running state. The
 * two factors of all queries go through one exp. */
static inline __attribute__((always_inline)) void merge(tile_state* state, size_t count,
                                                        const bool* has_tokens,
                                                        const bool* is_first, const float* max,
                                                        const float* sum,
                                                        float (*o)[ELM_MAX_HEAD_DIM], size_t n) {
  float factors[16] = {0}; /* for query a: old at a, new at 8 + a */
  float top[ELM_QUERY_TILE];
  for (size_t a = 0; a < count; ++a) {
    top[a] = max[a] > state->max[a] ? max[a] : state->max[a];
    factors[a] = state->max[a] - top[a];
    factors[8 + a] = max[a] - top[a];
  }
  v_store(factors, v_exp(v_load(factors)));
  for (size_t a = 0; a < count; ++a) {
    if (!has_tokens[a]) {
      continue;
    }
    if (is_first[a]) {
      state->max[a] = max[a];
      state->sum[a] = sum[a];
      memcpy(state->out[a], o[a], n * sizeof(float));
      continue;
    }
    const float old_factor = factors[a], new_factor = factors[8 + a];
    state->max[a] = top[a];
    state->sum[a] = fmaf(state->sum[a], old_factor, sum[a] * new_factor);
    for (size_t i = 0; i < n; i += 16) {
      const f16v scaled = v_mul(v_load(o[a] + i), v_set(new_factor));
      v_store(state->out[a] + i, v_fma(v_load(state->out[a] + i), v_set(old_factor), scaled));
    }
  }
}

/* Leaves a block's (max, sum, o) for attention_merge_f32; `block` is its number in the cache. */
static inline void keep(const elm_attention_args* args, size_t first_query, size_t count,
                        size_t block, const bool* has_tokens, const float* max, const float* sum,
                        float (*o)[ELM_MAX_HEAD_DIM]) {
  const size_t n = args->n;
  for (size_t a = 0; a < count; ++a) {
    if (has_tokens[a]) {
      const size_t number = block - args->begin[first_query + a] / ELM_KV_BLOCK;
      float* part = args->parts[first_query + a] + number * elm_attention_part_floats(n);
      memcpy(part, o[a], n * sizeof(float));
      part[n] = max[a];
      part[n + 1] = sum[a];
    }
  }
}

/* out = O / L; a part is left as it is. */
static inline void finish(const tile_state* state, size_t count, size_t n, bool is_part) {
  for (size_t a = 0; a < count; ++a) {
    if (is_part) { /* its out is the part */
      state->out[a][n] = state->max[a];
      state->out[a][n + 1] = state->sum[a];
      continue;
    }
    const f16v inverse = v_set(1.0f / state->sum[a]);
    for (size_t i = 0; i < n; i += 16) {
      v_store(state->out[a] + i, v_mul(v_load(state->out[a] + i), inverse));
    }
  }
}

/* Slots [from, to) of the block at `base` that positions [begin, end) have; from >= to: none. */
typedef struct block_range {
  size_t from;
  size_t to;
} block_range;

static inline block_range range_in_block(size_t begin, size_t end, size_t base) {
  const size_t past = base + ELM_KV_BLOCK;
  const block_range range = {
      begin <= base  ? 0
      : begin < past ? begin - base
                     : ELM_KV_BLOCK,
      end >= past  ? ELM_KV_BLOCK
      : end > base ? end - base
                   : 0,
  };
  return range;
}
