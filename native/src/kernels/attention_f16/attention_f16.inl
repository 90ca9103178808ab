/* Written on simd.h; a tile of ELM_QUERY_TILE queries shares every load of a key or a value. How
 * queries are tiled changes no result: each query's sums run over i and j in rising order alone. */
#include <math.h>

#include "kernels/kernels.h"
#include "kernels/simd.h"

/* The running (max, sum, out) of the queries in a tile. */
typedef struct tile_state {
  float max[ELM_QUERY_TILE];
  float sum[ELM_QUERY_TILE];
  float* out[ELM_QUERY_TILE];
} tile_state;

/* scores[n][j] = chain over i of q[n][i] * k[i][j], all 32 tokens; unused ones are masked later. */
static inline __attribute__((always_inline)) void tile_scores(const float* const* q, size_t count,
                                                              const uint16_t* k, size_t n,
                                                              float (*scores)[ELM_KV_BLOCK]) {
  f16v low[ELM_QUERY_TILE], high[ELM_QUERY_TILE];
  for (size_t a = 0; a < count; ++a) {
    low[a] = v_set(0.0f);
    high[a] = v_set(0.0f);
  }
  for (size_t i = 0; i < n; ++i) {
    const f16v k_low = v_load_half(k + i * ELM_KV_BLOCK);
    const f16v k_high = v_load_half(k + i * ELM_KV_BLOCK + 16);
    for (size_t a = 0; a < count; ++a) {
      const f16v query = v_set(q[a][i]);
      low[a] = v_fma(query, k_low, low[a]);
      high[a] = v_fma(query, k_high, high[a]);
    }
  }
  for (size_t a = 0; a < count; ++a) {
    v_store(scores[a], low[a]);
    v_store(scores[a] + 16, high[a]);
  }
}

/* o[n][i] += chain over j in [first, last) of p[n][j] * v[j][i]. */
static inline __attribute__((always_inline)) void tile_values(float (*p)[ELM_KV_BLOCK],
                                                              size_t count, const uint16_t* v,
                                                              size_t n, size_t first, size_t last,
                                                              float (*o)[ELM_MAX_HEAD_DIM]) {
  for (size_t i = 0; i < n; i += 16) {
    f16v sum[ELM_QUERY_TILE];
    for (size_t a = 0; a < count; ++a) {
      sum[a] = v_load(o[a] + i);
    }
    for (size_t j = first; j < last; ++j) {
      const f16v value = v_load_half(v + j * n + i);
      for (size_t a = 0; a < count; ++a) {
        sum[a] = v_fma(v_set(p[a][j]), value, sum[a]);
      }
    }
    for (size_t a = 0; a < count; ++a) {
      v_store(o[a] + i, sum[a]);
    }
  }
}

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

static inline __attribute__((always_inline)) void tile(const elm_attention_args* args,
                                                       size_t first_query, size_t count) {
  const size_t n = args->n;
  const float* const* q = args->q + first_query;
  const size_t* begin = args->begin + first_query;
  const size_t* end = args->end + first_query;
  tile_state state = {{0}, {0}, {NULL}};
  size_t low = begin[0], high = end[0];
  for (size_t a = 0; a < count; ++a) {
    state.out[a] = args->out[first_query + a];
    low = begin[a] < low ? begin[a] : low;
    high = end[a] > high ? end[a] : high;
  }
  float scores[ELM_QUERY_TILE][ELM_KV_BLOCK];
  float o[ELM_QUERY_TILE][ELM_MAX_HEAD_DIM];
  for (size_t block = low / ELM_KV_BLOCK; block * ELM_KV_BLOCK < high; ++block) {
    const size_t base = block * ELM_KV_BLOCK;
    const uint16_t* v = args->v + base * n;
    size_t from[ELM_QUERY_TILE], to[ELM_QUERY_TILE];
    size_t common_from = 0, common_to = ELM_KV_BLOCK;
    bool has_tokens[ELM_QUERY_TILE], is_first[ELM_QUERY_TILE];
    float max[ELM_QUERY_TILE] = {0}, sum[ELM_QUERY_TILE] = {0};
    tile_scores(q, count, args->k + base * n, n, scores);
    for (size_t a = 0; a < count; ++a) {
      from[a] = begin[a] > base ? begin[a] - base : 0;
      to[a] = end[a] < base + ELM_KV_BLOCK ? (end[a] > base ? end[a] - base : 0) : ELM_KV_BLOCK;
      from[a] = from[a] < ELM_KV_BLOCK ? from[a] : ELM_KV_BLOCK;
      common_from = from[a] > common_from ? from[a] : common_from;
      common_to = to[a] < common_to ? to[a] : common_to;
      has_tokens[a] = from[a] < to[a];
      is_first[a] = begin[a] >= base;
      if (has_tokens[a]) {
        soften(scores[a], from[a], to[a], &max[a], &sum[a]);
      }
      memset(o[a], 0, n * sizeof(float));
    }
    /* Each query's chain over j: its own tokens before those all share, then these, then the rest. */
    const bool has_common = common_from < common_to;
    for (size_t a = 0; a < count; ++a) {
      tile_values(scores + a, 1, v, n, from[a], has_common ? common_from : to[a], o + a);
    }
    if (has_common) {
      tile_values(scores, count, v, n, common_from, common_to, o);
      for (size_t a = 0; a < count; ++a) {
        tile_values(scores + a, 1, v, n, common_to, to[a], o + a);
      }
    }
    merge(&state, count, has_tokens, is_first, max, sum, o, n);
  }
  for (size_t a = 0; a < count; ++a) {
    const f16v inverse = v_set(1.0f / state.sum[a]);
    for (size_t i = 0; i < n; i += 16) {
      v_store(state.out[a] + i, v_mul(v_load(state.out[a] + i), inverse));
    }
  }
}

void ELM_NAME(const elm_attention_args* args) {
  size_t first = 0;
  for (; first + ELM_QUERY_TILE <= args->num_queries; first += ELM_QUERY_TILE) {
    tile(args, first, ELM_QUERY_TILE);
  }
#if ELM_QUERY_TILE > 1
  switch (args->num_queries - first) {
#if ELM_QUERY_TILE > 2
    case 7: tile(args, first, 7); break;
    case 6: tile(args, first, 6); break;
    case 5: tile(args, first, 5); break;
    case 4: tile(args, first, 4); break;
    case 3: tile(args, first, 3); break;
    case 2: tile(args, first, 2); break;
#endif
    case 1: tile(args, first, 1); break;
    default: break;
  }
#endif
}
