/* The attention step. */
#include "runtime/pass.h"

/* The arguments of queries [from, from + 8) of a key/value head, as far as there are so many. */
static elm_attention_args attention_args(const forward* f, const elm_step* step, size_t head,
                                         size_t from) {
  elm_session* s = f->session;
  const elm_arch* arch = f->model->arch;
  const size_t n = (size_t)arch->head_dim;
  const size_t group = (size_t)(arch->num_heads / arch->num_kv_heads);
  const elm_kv_head cache = elm_kv_head_at(&s->cache, (size_t)step->layer, head);
  elm_attention_args args = {
      .k = cache.keys,
      .v = cache.values,
      .k_scale = cache.k_scale,
      .v_scale = cache.v_scale,
      .n = n,
  };
  const size_t queries = f->num_rows * group;
  for (size_t i = from; i < queries && i < from + ELM_ATTENTION_MAX_QUERIES; ++i) {
    const size_t row = i / group, query_head = head * group + i % group;
    const size_t end = f->position + row + 1, window = (size_t)step->window;
    const size_t slot = args.num_queries++;
    args.q[slot] = s->qkv + row * s->sizes.qkv + query_head * n;
    args.out[slot] = s->attended + row * s->sizes.attended + query_head * n;
    args.begin[slot] = window > 0 && end > window ? end - window : 0;
    args.end[slot] = end;
  }
  return args;
}

static void attend(const forward* f, const elm_attention_args* args) {
  if (f->session->cache.is_int8) {
    f->model->kernels.attention_q8(args);
  } else {
    f->model->kernels.attention_f16(args);
  }
}

/* Blocks [thread * total / T, ...) of all units, one after the other, are a thread's. */
static size_t first_of(const forward* f, size_t total, size_t thread) {
  return total * thread / (size_t)f->num_threads;
}

static size_t owner_of(const forward* f, size_t total, size_t block) {
  size_t thread = 0;
  while (first_of(f, total, thread + 1) <= block) {
    ++thread;
  }
  return thread;
}

/* One token whose units do not keep all threads busy: they share the blocks. Whoever begins a unit
 * merges its blocks as it goes; those who continue it leave the parts of theirs, and merge them
 * behind that when all are done. So parts are read by who wrote them, as far as it goes: from
 * another core they would cost as much as was saved. */
static void shared_attention(forward* f, const elm_step* step, int32_t thread, size_t first_block,
                             size_t num_blocks) {
  elm_session* s = f->session;
  const elm_arch* arch = f->model->arch;
  const size_t n = (size_t)arch->head_dim, part = elm_attention_part_floats(n);
  const size_t group = (size_t)(arch->num_heads / arch->num_kv_heads);
  const size_t tiles = elm_attention_tiles(arch, 1);
  const size_t total = (size_t)arch->num_kv_heads * tiles * num_blocks;
  const size_t first = first_of(f, total, (size_t)thread);
  const size_t last = first_of(f, total, (size_t)thread + 1);
  /* Of the unit in which this thread's blocks begin: */
  const size_t unit_first = first / num_blocks * num_blocks;
  const size_t starter = owner_of(f, total, unit_first);
  const size_t num_started = first_of(f, total, starter + 1) - unit_first; /* its first part */

  for (size_t unit = first / num_blocks; unit * num_blocks < last; ++unit) {
    const size_t head = unit / tiles, tile = unit % tiles * ELM_ATTENTION_MAX_QUERIES;
    const size_t from = unit * num_blocks < first ? first - unit * num_blocks : 0;
    const size_t left = last - unit * num_blocks;
    const size_t to = left < num_blocks ? left : num_blocks;
    elm_attention_args args = attention_args(f, step, head, tile);
    args.is_one_part = from == 0;
    for (size_t i = 0; i < args.num_queries; ++i) {
      const size_t begin = (first_block + from) * ELM_KV_BLOCK;
      const size_t end = (first_block + to) * ELM_KV_BLOCK;
      const size_t number = from == 0 ? 0 : 1 + from - num_started;
      float* parts = s->parts + (head * group + tile + i) * s->cache.num_blocks * part;
      args.parts[i] = from == 0 && to == num_blocks ? NULL : parts + number * part;
      args.begin[i] = begin > args.begin[i] ? begin : args.begin[i];
      args.end[i] = end < args.end[i] ? end : args.end[i];
    }
    attend(f, &args);
  }
  barrier(f, thread);
  if (first > unit_first) { /* one of those who continued the unit: its queries are shared */
    const size_t unit = unit_first / num_blocks;
    const size_t mergers = owner_of(f, total, unit_first + num_blocks - 1) - starter;
    const size_t merger = (size_t)thread - starter - 1;
    const size_t tile = unit % tiles * ELM_ATTENTION_MAX_QUERIES;
    const size_t queries =
        group - tile < ELM_ATTENTION_MAX_QUERIES ? group - tile : ELM_ATTENTION_MAX_QUERIES;
    for (size_t i = queries * merger / mergers; i < queries * (merger + 1) / mergers; ++i) {
      const size_t query_head = unit / tiles * group + tile + i;
      const elm_attention_merge_args args = {
          .parts = s->parts + query_head * s->cache.num_blocks * part,
          .num_parts = 1 + num_blocks - num_started,
          .out = s->attended + query_head * n,
          .n = n,
      };
      f->model->kernels.attention_merge_f32(&args);
    }
  }
  barrier(f, thread);
}

/* Blocks for each thread that are worth the barrier of sharing them. */
enum { MIN_SHARED_BLOCKS = 4 };

/* A unit is up to 8 queries on one key/value head: neighbouring tokens, the heads that share it. */
void elm_attention_step(forward* f, const elm_step* step, int32_t thread) {
  const size_t tiles = elm_attention_tiles(f->model->arch, f->num_rows);
  if (f->num_rows == 1 && f->session->parts != NULL) {
    const elm_attention_args args = attention_args(f, step, 0, 0);
    const size_t first_block = args.begin[0] / ELM_KV_BLOCK;
    const size_t num_blocks = (args.end[0] + ELM_KV_BLOCK - 1) / ELM_KV_BLOCK - first_block;
    const size_t total = (size_t)f->model->arch->num_kv_heads * tiles * num_blocks;
    if (total >= (size_t)MIN_SHARED_BLOCKS * (size_t)f->num_threads) {
      shared_attention(f, step, thread, first_block, num_blocks);
      return;
    }
  }
  piece p = {0};
  while (next_piece(f, step, thread, (size_t)f->model->arch->num_kv_heads * tiles, 1, &p)) {
    for (size_t unit = p.first; unit < p.last; ++unit) {
      const elm_attention_args args =
          attention_args(f, step, unit / tiles, unit % tiles * ELM_ATTENTION_MAX_QUERIES);
      attend(f, &args);
    }
  }
  barrier(f, thread);
}
