#include <string.h>

#include "runtime/sampler.h"
#include "runtime/session.h"

enum { DEFAULT_CHUNK = 128, MAX_CHUNK = 4096 };

void elm_session_options_default(elm_session_options* options) {
  *options = (elm_session_options){.struct_size = sizeof *options};
}

static size_t up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/* `rows` rows of `num_cols` quantised activations. */
static void take_q8(elm_arena* arena, elm_q8* q8, size_t rows, size_t num_cols) {
  q8->num_cols = num_cols;
  q8->stride = up(num_cols, 64);
  q8->num_superblocks = (num_cols + ELM_SUPERBLOCK - 1) / ELM_SUPERBLOCK;
  q8->q = elm_arena_take(arena, rows, q8->stride);
  q8->d = elm_arena_take(arena, rows * q8->num_superblocks, sizeof(float));
  q8->gsum = elm_arena_take(arena, rows * q8->num_superblocks, 8 * sizeof(int16_t));
  q8->bsum = elm_arena_take(arena, rows * q8->num_superblocks, sizeof(int32_t));
}

/* Whether some of the threads would wait while others attend to whole heads of one token. Of many
 * heads a thread more or less has one more: not worth a barrier. */
static bool shares_attention(const elm_model* model, int32_t num_threads) {
  const size_t threads = (size_t)num_threads;
  const size_t units = (size_t)model->arch->num_kv_heads * elm_attention_tiles(model->arch, 1);
  return units % threads != 0 && units < 4 * threads;
}

/* Places every buffer of a session in the arena; with an empty one, counts. The session struct
 * comes first, the KV cache last. */
static void place(const elm_model* model, elm_session* s, elm_arena* arena) {
  const elm_arch* arch = model->arch;
  const int32_t most =
      s->decode_threads > s->prefill_threads ? s->decode_threads : s->prefill_threads;
  const size_t num_threads = (size_t)most;
  const size_t chunk = s->chunk_length, ropes = (size_t)arch->num_ropes;
  const size_t half = (size_t)arch->head_dim / 2, rows = model->kernels.gemv_rows;
  const elm_sizes* sizes = &s->sizes;

  s->threads = elm_arena_take(arena, num_threads, sizeof(elm_private));
  s->claims = elm_arena_take(arena, model->num_steps, sizeof(atomic_size_t));
  s->ids = elm_arena_take(arena, s->context_length, sizeof(int32_t));
  s->sampler_scratch =
      elm_arena_take(arena, 1, elm_sampler_scratch_bytes((size_t)arch->vocab_size));
  s->x = elm_arena_take(arena, chunk * sizes->hidden, sizeof(float));
  s->y = elm_arena_take(arena, chunk * sizes->hidden, sizeof(float));
  s->qkv = elm_arena_take(arena, chunk * sizes->qkv, sizeof(float));
  s->attended = elm_arena_take(arena, chunk * sizes->attended, sizeof(float));
  s->ffn = elm_arena_take(arena, chunk * sizes->ffn, sizeof(float));
  s->last = elm_arena_take(arena, sizes->hidden, sizeof(float));
  s->logits = elm_arena_take(arena, rows * sizes->vocab, sizeof(float));
  s->cosine = elm_arena_take(arena, ropes * chunk * half, sizeof(float));
  s->sine = elm_arena_take(arena, ropes * chunk * half, sizeof(float));
  take_q8(arena, &s->q_hidden, chunk, sizes->hidden);
  take_q8(arena, &s->q_attended, chunk, sizes->attended);
  take_q8(arena, &s->q_ffn, chunk, sizes->ffn);
  for (size_t t = 0; t < num_threads; ++t) {
    elm_private counted; /* while counting there is no memory to write to */
    elm_private* own = arena->base == NULL ? &counted : &s->threads[t];
    own->x = elm_arena_take(arena, rows * sizes->hidden, sizeof(float));
    own->norm = elm_arena_take(arena, sizes->hidden, sizeof(float));
    own->strip = elm_arena_take(arena, chunk * ELM_STRIP_COLS, sizeof(float));
    take_q8(arena, &own->hidden, rows, sizes->hidden);
    take_q8(arena, &own->attended, rows, sizes->attended);
    take_q8(arena, &own->ffn, rows, sizes->ffn);
  }
  if (shares_attention(model, s->decode_threads)) {
    const size_t part = elm_attention_part_floats((size_t)arch->head_dim);
    s->parts = elm_arena_take(arena, (uint64_t)arch->num_heads * s->cache.num_blocks,
                              part * sizeof(float));
  }
  const uint64_t before = arena->used;
  s->cache.memory = elm_arena_take(arena, (uint64_t)s->cache.num_layers * s->cache.num_heads,
                                   elm_kv_head_bytes(&s->cache));
  s->kv_bytes = arena->used - before;
}

/* Checks the options and fills the sizes of a session that has no memory yet. */
static elm_status describe(const elm_model* model, const elm_session_options* options,
                           elm_session* s, uint64_t* bytes, elm_error* error) {
  elm_session_options defaults;
  if (options == NULL) {
    elm_session_options_default(&defaults);
    options = &defaults;
  }
  if (model == NULL || options->struct_size != sizeof *options) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "a session needs a model and options from elm_session_options_default");
  }
  const elm_arch* arch = model->arch;
  if (options->context_length < 0 || options->context_length > arch->max_context) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "context_length is %d; this model takes 1 to %d tokens (0: all)",
                    options->context_length, arch->max_context);
  }
  if (options->chunk_length < 0 || options->chunk_length > MAX_CHUNK) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "chunk_length is %d; give 1 to %d, or 0 for the default", options->chunk_length,
                    (int)MAX_CHUNK);
  }
  if (options->kv_format < ELM_KV_DEFAULT || options->kv_format > ELM_KV_INT8) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "kv_format is %d; give 0 (the file's), 1 (float16) or 2 (int8)",
                    options->kv_format);
  }
  const int32_t pool_threads = elm_pool_num_threads(model->pool);
  if (options->decode_threads < 0 || options->decode_threads > pool_threads ||
      options->prefill_threads < 0 || options->prefill_threads > pool_threads) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "%d threads are to decode and %d to prefill; the model's pool has %d (0: all)",
                    options->decode_threads, options->prefill_threads, pool_threads);
  }
  memset(s, 0, sizeof *s);
  s->decode_threads = options->decode_threads > 0 ? options->decode_threads : pool_threads;
  s->prefill_threads = options->prefill_threads > 0 ? options->prefill_threads : pool_threads;
  s->context_length =
      (size_t)(options->context_length > 0 ? options->context_length : arch->max_context);
  s->chunk_length = (size_t)(options->chunk_length > 0 ? options->chunk_length : DEFAULT_CHUNK);
  s->chunk_length = s->chunk_length < s->context_length ? s->chunk_length : s->context_length;
  const size_t head_dim = (size_t)arch->head_dim;
  s->sizes.hidden = up((size_t)arch->hidden_size, ELM_GROUP);
  s->sizes.attended = up((size_t)arch->num_heads * head_dim, ELM_GROUP);
  s->sizes.qkv = ((size_t)arch->num_heads + 2 * (size_t)arch->num_kv_heads) * head_dim;
  s->sizes.ffn = up((size_t)arch->ffn_size, ELM_GROUP);
  s->sizes.vocab = up((size_t)arch->vocab_size, ELM_PANEL_ROWS);
  s->cache.is_int8 =
      options->kv_format == ELM_KV_DEFAULT ? arch->is_kv_int8 : options->kv_format == ELM_KV_INT8;
  s->cache.num_layers = (size_t)arch->num_layers;
  s->cache.num_heads = (size_t)arch->num_kv_heads;
  s->cache.head_dim = head_dim;
  s->cache.num_blocks = (s->context_length + ELM_KV_BLOCK - 1) / ELM_KV_BLOCK;
  elm_arena counter = {0};
  (void)elm_arena_take(&counter, 1, sizeof *s);
  place(model, s, &counter);
  if (counter.has_overflow) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY,
                    "a session of %zu tokens is larger than this machine can address",
                    s->context_length);
  }
  *bytes = counter.used;
  return ELM_STATUS_OK;
}

elm_status elm_session_bytes(const elm_model* model, const elm_session_options* options,
                             uint64_t* kv_bytes, uint64_t* scratch_bytes, elm_error* error) {
  elm_session described;
  uint64_t bytes = 0;
  if (kv_bytes == NULL || scratch_bytes == NULL) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT, "elm_session_bytes needs two results");
  }
  const elm_status status = describe(model, options, &described, &bytes, error);
  if (status == ELM_STATUS_OK) {
    *kv_bytes = described.kv_bytes;
    *scratch_bytes = bytes - described.kv_bytes;
  }
  return status;
}

elm_status elm_session_create(elm_model* model, const elm_session_options* options,
                              elm_session** out, elm_error* error) {
  if (out == NULL) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT, "elm_session_create needs an out");
  }
  *out = NULL;
  elm_session described;
  uint64_t bytes = 0;
  const elm_status status = describe(model, options, &described, &bytes, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  const elm_allocator allocator = model->allocator;
  void* memory = allocator.allocate(allocator.context, (size_t)bytes, 64);
  if (memory == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY,
                    "no memory for a session of %zu tokens: %llu MiB; give a shorter context",
                    described.context_length, (unsigned long long)(bytes >> 20));
  }
  /* All but the cache, which comes last and whose slots are masked until they are written: touching
   * it would cost its memory. */
  memset(memory, 0, (size_t)(bytes - described.kv_bytes));
  elm_arena arena = {.base = memory};
  elm_session* session = elm_arena_take(&arena, 1, sizeof *session);
  *session = described;
  place(model, session, &arena);
  session->model = model;
  session->allocator = allocator;
  session->memory = memory;
  session->memory_bytes = bytes;
  atomic_flag_clear(&session->busy);
  *out = session;
  return ELM_STATUS_OK;
}

void elm_session_destroy(elm_session* session) {
  if (session == NULL) {
    return;
  }
  const elm_allocator allocator = session->allocator;
  allocator.release(allocator.context, session->memory, (size_t)session->memory_bytes);
}

elm_status elm_session_get_info(const elm_session* session, elm_session_info* info,
                                elm_error* error) {
  if (session == NULL || info == NULL || info->struct_size != sizeof *info) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "elm_session_get_info needs a session and an info with its struct_size set");
  }
  *info = (elm_session_info){
      .struct_size = sizeof *info,
      .context_length = (int32_t)session->context_length,
      .num_tokens = (int32_t)session->num_tokens,
      .chunk_length = (int32_t)session->chunk_length,
      .kv_format = session->cache.is_int8 ? ELM_KV_INT8 : ELM_KV_F16,
      .decode_threads = session->decode_threads,
      .prefill_threads = session->prefill_threads,
      .kv_bytes = session->kv_bytes,
      .scratch_bytes = session->memory_bytes - session->kv_bytes,
      .num_passes = session->num_passes,
      .num_barriers = session->num_barriers,
  };
  return ELM_STATUS_OK;
}

/* One thread at a time: enter, then leave with the status. */
static elm_status enter(elm_session* session, elm_error* error) {
  if (session == NULL) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT, "the session is NULL");
  }
  if (atomic_flag_test_and_set_explicit(&session->busy, memory_order_acquire)) {
    return elm_fail(error, ELM_STATUS_BUSY,
                    "the session is in use by another thread; give each thread its own");
  }
  return ELM_STATUS_OK;
}

static elm_status leave(elm_session* session, elm_status status) {
  atomic_flag_clear_explicit(&session->busy, memory_order_release);
  return status;
}

/* Computes all tokens of the sequence that are not in the cache yet. The last `num_logits` tokens'
 * logits go to `logits`. */
static elm_status compute(elm_session* s, float* logits, size_t num_logits, bool wants_newest,
                          elm_error* error) {
  const size_t vocab = (size_t)s->model->arch->vocab_size;
  while (s->num_computed < s->num_tokens) {
    const size_t left = s->num_tokens - s->num_computed;
    const size_t count = left < s->chunk_length ? left : s->chunk_length;
    const size_t after = left - count; /* tokens of later chunks */
    const size_t wanted = num_logits > after ? num_logits - after : 0;
    const size_t rows = wanted < count ? wanted : count;
    float* to = rows == 0 ? NULL : logits + (num_logits - after - rows) * vocab;
    const elm_status status = elm_forward(s, count, to, rows, wants_newest && after == 0, error);
    if (status != ELM_STATUS_OK) {
      return status;
    }
  }
  return ELM_STATUS_OK;
}

/* Makes session->logits those after the last token, with as little work as that takes. */
static elm_status need_logits(elm_session* s, elm_error* error) {
  if (s->num_tokens == 0) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "the sequence is empty; prefill at least one token");
  }
  if (s->logits_at == s->num_tokens) {
    return ELM_STATUS_OK;
  }
  if (s->num_computed == s->num_tokens && s->hidden_at == s->num_tokens) {
    return elm_forward_head(s, error);
  }
  if (s->num_computed == s->num_tokens) { /* truncated: the last token is computed again */
    s->num_computed -= 1;
  }
  return compute(s, NULL, 0, true, error);
}

elm_status elm_session_prefill(elm_session* session, const int32_t* ids, size_t num_ids,
                               float* logits, size_t num_logits, elm_error* error) {
  elm_status status = enter(session, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  const int32_t num_known = session->model->arch->num_tokens;
  if (ids == NULL || num_ids == 0) {
    return leave(session, elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                                   "the prompt is empty; give at least one token"));
  }
  if (num_logits > num_ids || (logits == NULL && num_logits > 0)) {
    return leave(session, elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                                   "%zu rows of logits were asked for with %zu tokens", num_logits,
                                   num_ids));
  }
  if (num_ids > session->context_length - session->num_tokens) {
    return leave(session,
                 elm_fail(error, ELM_STATUS_CONTEXT_FULL,
                          "the prompt has %zu tokens after %zu, but the context holds %zu; shorten "
                          "it or give a larger context",
                          num_ids, session->num_tokens, session->context_length));
  }
  for (size_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0 || ids[i] >= num_known) {
      return leave(session, elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                                     "token %zu of the prompt is %d; this model knows 0 to %d", i,
                                     ids[i], num_known - 1));
    }
  }
  memcpy(session->ids + session->num_tokens, ids, num_ids * sizeof *ids);
  session->num_tokens += num_ids;
  session->num_generated = 0;
  status = compute(session, logits, num_logits, false, error);
  return leave(session, status);
}

elm_status elm_session_step(elm_session* session, const elm_sampling* sampling, int32_t* ids,
                            size_t capacity, size_t* num_ids, elm_error* error) {
  elm_status status = enter(session, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  if (ids == NULL || num_ids == NULL || capacity == 0) {
    return leave(session, elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                                   "elm_session_step needs room for at least one token"));
  }
  *num_ids = 0;
  const size_t num_known = (size_t)session->model->arch->num_tokens;
  if (session->num_tokens >= session->context_length) {
    return leave(session, elm_fail(error, ELM_STATUS_CONTEXT_FULL,
                                   "the context of %zu tokens is full", session->context_length));
  }
  status = elm_sampling_check(sampling, num_known, error);
  if (status == ELM_STATUS_OK) {
    status = need_logits(session, error);
  }
  int32_t id = 0;
  if (status == ELM_STATUS_OK) {
    status = elm_sampler_run(session->logits, (size_t)session->model->arch->vocab_size, sampling,
                             session->ids, session->num_tokens, session->num_generated,
                             session->num_tokens, session->sampler_scratch, &id, error);
  }
  if (status == ELM_STATUS_OK) {
    session->ids[session->num_tokens++] = id;
    session->num_generated += 1;
    ids[0] = id;
    *num_ids = 1;
  }
  return leave(session, status);
}

elm_status elm_session_logits(elm_session* session, float* logits, elm_error* error) {
  elm_status status = enter(session, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  if (logits == NULL) {
    return leave(session, elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                                   "elm_session_logits needs a buffer of vocab_size numbers"));
  }
  status = need_logits(session, error);
  if (status == ELM_STATUS_OK) {
    memcpy(logits, session->logits, (size_t)session->model->arch->vocab_size * sizeof *logits);
  }
  return leave(session, status);
}

elm_status elm_session_truncate(elm_session* session, size_t num_tokens, elm_error* error) {
  elm_status status = enter(session, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  if (num_tokens > session->num_tokens) {
    return leave(session, elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                                   "cannot truncate a sequence of %zu tokens to %zu",
                                   session->num_tokens, num_tokens));
  }
  const size_t dropped = session->num_tokens - num_tokens;
  session->num_tokens = num_tokens;
  session->num_generated = dropped < session->num_generated ? session->num_generated - dropped : 0;
  if (session->num_computed > num_tokens) {
    session->num_computed = num_tokens;
  }
  /* Both may belong to a token that is gone, and later to another of the same position. */
  if (session->hidden_at > num_tokens) {
    session->hidden_at = 0;
  }
  if (session->logits_at > num_tokens) {
    session->logits_at = 0;
  }
  return leave(session, status);
}
