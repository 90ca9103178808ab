/* Attention over an int8 cache: both products are exact integers.
 *
 * The query is turned and quantised like the keys: score = isum * ((dq / block) * dk). Within a
 * block of tokens p[j] * dv[j] is quantised with one scale dp: o[i] = isum * dp. */
#include "kernels/attention/softmax.inl"
#include "kernels/hadamard.inl"
#include "kernels/quantise.inl"

/* A tile of queries, quantised. */
typedef struct tile_queries {
  _Alignas(64) int8_t q[ELM_QUERY_TILE][ELM_MAX_HEAD_DIM];
  float scale[ELM_QUERY_TILE]; /* dq / block */
  int32_t total[ELM_QUERY_TILE];
} tile_queries;

static inline int32_t load_four(const int8_t* p) {
  int32_t four;
  memcpy(&four, p, sizeof four);
  return four;
}

static inline int32_t total_of(const int8_t* q, size_t n) {
  int32_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    total += q[i];
  }
  return total;
}

static inline void quantise_queries(const float* const* q, size_t count, size_t n,
                                    tile_queries* out) {
  float turned[ELM_MAX_HEAD_DIM];
  for (size_t a = 0; a < count; ++a) {
    memcpy(turned, q[a], n * sizeof(float));
    hadamard(turned, n);
    out->scale[a] = quantise(turned, n, out->q[a]) / (float)hadamard_block(n);
    out->total[a] = total_of(out->q[a], n);
  }
}

/* All 32 scores of a block; those of tokens a query does not see are masked later. */
static inline __attribute__((always_inline)) void tile_scores(const tile_queries* queries,
                                                              size_t count, const int8_t* k,
                                                              const float* k_scale, size_t n,
                                                              float (*scores)[ELM_KV_BLOCK]) {
  i32v low[ELM_QUERY_TILE], high[ELM_QUERY_TILE];
  ELM_UNROLL
  for (size_t a = 0; a < count; ++a) {
    low[a] = v_dot_zero(queries->total[a]);
    high[a] = v_dot_zero(queries->total[a]);
  }
  for (size_t i = 0; i < n; i += 4) {
    const v_line k_low = v_load_line(k + i * ELM_KV_BLOCK);
    const v_line k_high = v_load_line(k + i * ELM_KV_BLOCK + 64);
    ELM_UNROLL
    for (size_t a = 0; a < count; ++a) {
      const int32_t four = load_four(queries->q[a] + i);
      low[a] = v_dot(low[a], k_low, four);
      high[a] = v_dot(high[a], k_high, four);
    }
  }
  const f16v scale_low = v_load(k_scale), scale_high = v_load(k_scale + 16);
  ELM_UNROLL
  for (size_t a = 0; a < count; ++a) {
    const f16v scale = v_set(queries->scale[a]);
    v_store(scores[a], v_mul(v_from_int(low[a]), v_mul(scale, scale_low)));
    v_store(scores[a] + 16, v_mul(v_from_int(high[a]), v_mul(scale, scale_high)));
  }
}

/* o[a][i] = sum over the tokens in ranges[a] of p * value. */
static inline __attribute__((always_inline)) void tile_values(float (*p)[ELM_KV_BLOCK],
                                                              const block_range* ranges,
                                                              size_t count, const int8_t* v,
                                                              const float* v_scale, size_t n,
                                                              float (*o)[ELM_MAX_HEAD_DIM]) {
  _Alignas(64) int8_t q[ELM_QUERY_TILE][ELM_KV_BLOCK];
  float scale[ELM_QUERY_TILE];
  int32_t total[ELM_QUERY_TILE];
  ELM_UNROLL
  for (size_t a = 0; a < count; ++a) {
    float weighted[ELM_KV_BLOCK];
    v_store(weighted, v_mul(v_load(p[a]), v_load(v_scale)));
    v_store(weighted + 16, v_mul(v_load(p[a] + 16), v_load(v_scale + 16)));
    for (size_t j = 0; j < ranges[a].from; ++j) { /* slots it does not see may hold anything */
      weighted[j] = 0.0f;
    }
    for (size_t j = ranges[a].to; j < ELM_KV_BLOCK; ++j) {
      weighted[j] = 0.0f;
    }
    scale[a] = quantise(weighted, ELM_KV_BLOCK, q[a]);
    total[a] = total_of(q[a], ELM_KV_BLOCK);
  }
  for (size_t i = 0; i < n; i += 16) {
    i32v sum[ELM_QUERY_TILE];
    ELM_UNROLL
    for (size_t a = 0; a < count; ++a) {
      sum[a] = v_dot_zero(total[a]);
    }
    for (size_t j = 0; j < ELM_KV_BLOCK; j += 4) {
      const v_line line = v_load_line(v + j * n + 4 * i);
      ELM_UNROLL
      for (size_t a = 0; a < count; ++a) {
        sum[a] = v_dot(sum[a], line, load_four(q[a] + j));
      }
    }
    ELM_UNROLL
    for (size_t a = 0; a < count; ++a) {
      v_store(o[a] + i, v_mul(v_from_int(sum[a]), v_set(scale[a])));
    }
  }
}

static inline __attribute__((always_inline)) void tile(const elm_attention_args* args,
                                                       size_t first_query, size_t count) {
  const size_t n = args->n;
  const size_t* begin = args->begin + first_query;
  const size_t* end = args->end + first_query;
  const bool is_part = args->parts[first_query] != NULL;
  const bool is_split = is_part && !args->is_one_part;
  tile_state state = {{0}, {0}, {NULL}};
  tile_queries queries;
  size_t low = begin[0], high = end[0];
  for (size_t a = 0; a < count; ++a) {
    state.out[a] = is_part ? args->parts[first_query + a] : args->out[first_query + a];
    low = begin[a] < low ? begin[a] : low;
    high = end[a] > high ? end[a] : high;
  }
  quantise_queries(args->q + first_query, count, n, &queries);
  float scores[ELM_QUERY_TILE][ELM_KV_BLOCK];
  float o[ELM_QUERY_TILE][ELM_MAX_HEAD_DIM];
  for (size_t base = low / ELM_KV_BLOCK * ELM_KV_BLOCK; base < high; base += ELM_KV_BLOCK) {
    const int8_t* k = (const int8_t*)args->k + base * n;
    const int8_t* v = (const int8_t*)args->v + base * n;
    float max[ELM_QUERY_TILE] = {0}, sum[ELM_QUERY_TILE] = {0};
    bool has_tokens[ELM_QUERY_TILE], is_first[ELM_QUERY_TILE];
    block_range ranges[ELM_QUERY_TILE];
    tile_scores(&queries, count, k, args->k_scale + base, n, scores);
    for (size_t a = 0; a < count; ++a) {
      ranges[a] = range_in_block(begin[a], end[a], base);
      has_tokens[a] = ranges[a].from < ranges[a].to;
      is_first[a] = begin[a] >= base;
      if (has_tokens[a]) {
        soften(scores[a], ranges[a].from, ranges[a].to, &max[a], &sum[a]);
      }
    }
    tile_values(scores, ranges, count, v, args->v_scale + base, n, o);
    if (is_split) {
      keep(args, first_query, count, base / ELM_KV_BLOCK, has_tokens, max, sum, o);
    } else {
      merge(&state, count, has_tokens, is_first, max, sum, o, n);
    }
  }
  if (!is_split) {
    finish(&state, count, n, is_part);
  }
}

#include "kernels/attention/tiles.inl"
