/* Written on simd.h; a tile of ELM_QUERY_TILE queries shares every load of a key or a value. How
 * queries are tiled changes no result: each query's sums run over i and j in rising order alone. */
#include "kernels/attention/softmax.inl"

/* scores[n][j] = chain over i of q[n][i] * k[i][j], all 32 tokens; unused ones are masked later. */
static inline __attribute__((always_inline)) void tile_scores(const float* const* q, size_t count,
                                                              const uint16_t* k, size_t n,
                                                              float (*scores)[ELM_KV_BLOCK]) {
  f16v low[ELM_QUERY_TILE], high[ELM_QUERY_TILE];
  ELM_UNROLL
  for (size_t a = 0; a < count; ++a) {
    low[a] = v_set(0.0f);
    high[a] = v_set(0.0f);
  }
  for (size_t i = 0; i < n; ++i) {
    const f16v k_low = v_load_half(k + i * ELM_KV_BLOCK);
    const f16v k_high = v_load_half(k + i * ELM_KV_BLOCK + 16);
    ELM_UNROLL
    for (size_t a = 0; a < count; ++a) {
      const f16v query = v_set(q[a][i]);
      low[a] = v_fma(query, k_low, low[a]);
      high[a] = v_fma(query, k_high, high[a]);
    }
  }
  ELM_UNROLL
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
    ELM_UNROLL
    for (size_t a = 0; a < count; ++a) {
      sum[a] = v_load(o[a] + i);
    }
    for (size_t j = first; j < last; ++j) {
      const f16v value = v_load_half(v + j * n + i);
      ELM_UNROLL
      for (size_t a = 0; a < count; ++a) {
        sum[a] = v_fma(v_set(p[a][j]), value, sum[a]);
      }
    }
    ELM_UNROLL
    for (size_t a = 0; a < count; ++a) {
      v_store(o[a] + i, sum[a]);
    }
  }
}

static inline __attribute__((always_inline)) void tile(const elm_attention_args* args,
                                                       size_t first_query, size_t count) {
  const size_t n = args->n;
  const float* const* q = args->q + first_query;
  const size_t* begin = args->begin + first_query;
  const size_t* end = args->end + first_query;
  const bool is_part = args->parts[first_query] != NULL;
  const bool is_split = is_part && !args->is_one_part;
  tile_state state = {{0}, {0}, {NULL}};
  size_t low = begin[0], high = end[0];
  for (size_t a = 0; a < count; ++a) {
    state.out[a] = is_part ? args->parts[first_query + a] : args->out[first_query + a];
    low = begin[a] < low ? begin[a] : low;
    high = end[a] > high ? end[a] : high;
  }
  float scores[ELM_QUERY_TILE][ELM_KV_BLOCK];
  float o[ELM_QUERY_TILE][ELM_MAX_HEAD_DIM];
  for (size_t block = low / ELM_KV_BLOCK; block * ELM_KV_BLOCK < high; ++block) {
    const size_t base = block * ELM_KV_BLOCK;
    const uint16_t* k = (const uint16_t*)args->k + base * n;
    const uint16_t* v = (const uint16_t*)args->v + base * n;
    size_t from[ELM_QUERY_TILE], to[ELM_QUERY_TILE];
    size_t common_from = 0, common_to = ELM_KV_BLOCK;
    bool has_tokens[ELM_QUERY_TILE], is_first[ELM_QUERY_TILE];
    float max[ELM_QUERY_TILE] = {0}, sum[ELM_QUERY_TILE] = {0};
    tile_scores(q, count, k, n, scores);
    for (size_t a = 0; a < count; ++a) {
      const block_range range = range_in_block(begin[a], end[a], base);
      from[a] = range.from;
      to[a] = range.to;
      common_from = from[a] > common_from ? from[a] : common_from;
      common_to = to[a] < common_to ? to[a] : common_to;
      has_tokens[a] = from[a] < to[a];
      is_first[a] = begin[a] >= base;
      if (has_tokens[a]) {
        soften(scores[a], from[a], to[a], &max[a], &sum[a]);
      }
      memset(o[a], 0, n * sizeof(float));
    }
    /* Each query's chain over j: its own tokens before those all share, then these, then others. */
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
    if (is_split) {
      keep(args, first_query, count, block, has_tokens, max, sum, o);
    } else {
      merge(&state, count, has_tokens, is_first, max, sum, o, n);
    }
  }
  if (!is_split) {
    finish(&state, count, n, is_part);
  }
}

#include "kernels/attention/tiles.inl"
