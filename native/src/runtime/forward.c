/* The forward pass. All threads walk the plan together; a barrier follows each step whose result
 * another thread reads.
 *
 * A small pass (decode: as many rows as a gemv takes) is bound by reading weights, so norms and
 * quantisation are done by every thread on its own copy, which saves four barriers a layer. A large
 * pass (prefill) splits the rows instead. Both give the same bits: what a row's numbers are depends
 * on neither. */
#include <math.h>
#include <string.h>

#include "runtime/embed.h"
#include "runtime/pass.h"
#include "runtime/rope.h"

static void embed(const forward* f, int32_t thread) {
  const elm_session* s = f->session;
  const elm_arch* arch = f->model->arch;
  const float* scale = f->model->embed_scale;
  size_t first, last;
  rows_of(f, thread, &first, &last);
  for (size_t m = first; m < last; ++m) {
    float* x = residual(f, thread) + m * s->sizes.hidden;
    elm_embed_row(f->model->embedding, (size_t)s->ids[f->position + m], x);
    if (arch->has_hadamard && arch->is_tied) { /* transformed as a head: this undoes it */
      const elm_hadamard_args args = {x, (size_t)arch->hidden_size};
      f->model->kernels.hadamard_f32(&args);
    }
    for (size_t i = 0; i < (size_t)arch->hidden_size; ++i) {
      x[i] *= arch->embedding_scale;
    }
    for (size_t i = 0; scale != NULL && i < (size_t)arch->hidden_size; ++i) {
      x[i] *= scale[i];
    }
  }
}

static void rmsnorm(const forward* f, const float* x, const float* weight, size_t n, float* y) {
  const elm_rmsnorm_args args = {x, weight, y, n, f->model->arch->norm_eps};
  f->model->kernels.rmsnorm_f32(&args);
}

/* x += y, after the norm on y that some architectures have. */
static void add_output(const forward* f, const elm_step* step, int32_t thread, size_t row,
                       float* x) {
  const elm_session* s = f->session;
  const size_t n = (size_t)f->model->arch->hidden_size;
  const float* y = s->y + row * s->sizes.hidden;
  if (step->post_norm != NULL) {
    rmsnorm(f, y, step->post_norm, n, s->threads[thread].norm);
    y = s->threads[thread].norm;
  }
  for (size_t i = 0; i < n; ++i) {
    x[i] += y[i];
  }
}

static void quantise(const forward* f, const float* x, size_t n, const elm_q8* out, size_t row) {
  const elm_quant_args args = {x, n, out, row, f->model->arch->has_hadamard};
  f->model->kernels.quant_q8(&args);
}

static void norm(forward* f, const elm_step* step, int32_t thread) {
  elm_session* s = f->session;
  const size_t n = (size_t)f->model->arch->hidden_size;
  const elm_q8* out = f->is_small ? &s->threads[thread].hidden : &s->q_hidden;
  size_t first, last;
  rows_of(f, thread, &first, &last);
  for (size_t m = first; m < last; ++m) {
    float* x = residual(f, thread) + m * s->sizes.hidden;
    if (step->has_residual) {
      add_output(f, step, thread, m, x);
    }
    rmsnorm(f, x, step->norm, n, s->threads[thread].norm);
    quantise(f, s->threads[thread].norm, n, out, m);
  }
  if (!f->is_small) {
    barrier(f, thread);
  }
}

/* Quantises a shared (rows, stride) buffer; returns where this thread finds the result. */
static const elm_q8* quantise_rows(forward* f, int32_t thread, const float* x, size_t stride,
                                   size_t n, const elm_q8* own, const elm_q8* shared) {
  size_t first, last;
  rows_of(f, thread, &first, &last);
  for (size_t m = first; m < last; ++m) {
    quantise(f, x + m * stride, n, f->is_small ? own : shared, m);
  }
  if (f->is_small) {
    return own;
  }
  barrier(f, thread);
  return shared;
}

/* out = panels [first, last) of the matrix times x; column 0 of out is row 0 of panel `origin`. */
static void multiply(const forward* f, const elm_matrix* matrix, const elm_q8* x, size_t first,
                     size_t last, size_t origin, float* out, size_t out_stride) {
  const elm_matmul_args args = {
      .weights = (const uint8_t*)matrix->tensor->data + origin * matrix->panel_bytes,
      .panel_bytes = matrix->panel_bytes,
      .first_panel = first - origin,
      .last_panel = last - origin,
      .x = x,
      .num_rows = f->num_rows,
      .out = out,
      .out_stride = out_stride,
  };
  if (f->is_small) {
    matrix->gemv(&args);
  } else {
    matrix->gemm(&args);
  }
}

static void multiply_shared(forward* f, const elm_step* step, int32_t thread, const elm_q8* x,
                            float* out, size_t out_stride) {
  piece p = {0};
  while (next_piece(f, step, thread, step->matrix.num_panels, 2, &p)) {
    multiply(f, &step->matrix, x, p.first, p.last, 0, out, out_stride);
  }
  prefetch_next(f, step, thread);
  barrier(f, thread);
}

/* Bias, norm and rotation of one head of one row. */
static void finish_head(const forward* f, const elm_step* step, float* x, size_t head, size_t row,
                        const float* weight, float scale) {
  const elm_session* s = f->session;
  const size_t n = (size_t)f->model->arch->head_dim;
  if (step->bias != NULL) {
    for (size_t i = 0; i < n; ++i) {
      x[i] += step->bias[head * n + i];
    }
  }
  if (weight != NULL) {
    rmsnorm(f, x, weight, n, x);
  }
  if (scale != 0.0f) {
    const size_t at = ((size_t)step->rope * s->chunk_length + row) * (n / 2);
    const elm_rope_args args = {x, s->cosine + at, s->sine + at, n, scale};
    f->model->kernels.rope_f32(&args);
  }
}

/* The key and value of one token and head into the cache. */
static void store(const forward* f, const elm_kv_head* cache, size_t position, const float* k,
                  const float* v) {
  const elm_session* s = f->session;
  const size_t first = position / ELM_KV_BLOCK * ELM_KV_BLOCK; /* token of the block */
  const size_t offset = first * elm_kv_token_bytes(&s->cache);
  elm_kv_store_args args = {
      .k = k,
      .v = v,
      .k_block = cache->keys + offset,
      .v_block = cache->values + offset,
      .n = s->cache.head_dim,
      .slot = position % ELM_KV_BLOCK,
  };
  if (s->cache.is_int8) {
    args.k_scale = cache->k_scale + first;
    args.v_scale = cache->v_scale + first;
    f->model->kernels.kv_store_q8(&args);
  } else {
    f->model->kernels.kv_store_f16(&args);
  }
}

/* A unit is a head: queries first, then a key head together with its value head, so that whoever
 * computed a head's rows also rotates and stores them. */
static void qkv(forward* f, const elm_step* step, int32_t thread) {
  elm_session* s = f->session;
  const elm_arch* arch = f->model->arch;
  const size_t n = (size_t)arch->head_dim;
  const size_t panels = n / ELM_PANEL_ROWS;
  const size_t heads = (size_t)arch->num_heads, kv_heads = (size_t)arch->num_kv_heads;
  const elm_q8* x = f->is_small ? &s->threads[thread].hidden : &s->q_hidden;
  piece p = {0};
  while (next_piece(f, step, thread, heads + kv_heads, 1, &p)) {
    for (size_t unit = p.first; unit < p.last; ++unit) {
      multiply(f, &step->matrix, x, unit * panels, (unit + 1) * panels, 0, s->qkv, s->sizes.qkv);
      if (unit < heads) {
        for (size_t m = 0; m < f->num_rows; ++m) {
          float* q = s->qkv + m * s->sizes.qkv + unit * n;
          finish_head(f, step, q, unit, m, step->q_norm, arch->attention_scale);
        }
        continue;
      }
      const size_t value = unit + kv_heads, head = unit - heads;
      multiply(f, &step->matrix, x, value * panels, (value + 1) * panels, 0, s->qkv, s->sizes.qkv);
      const elm_kv_head cache = elm_kv_head_at(&s->cache, (size_t)step->layer, head);
      for (size_t m = 0; m < f->num_rows; ++m) {
        float* k = s->qkv + m * s->sizes.qkv + unit * n;
        float* v = s->qkv + m * s->sizes.qkv + value * n;
        finish_head(f, step, k, unit, m, step->k_norm, 1.0f);
        finish_head(f, step, v, value, m, NULL, 0.0f);
        store(f, &cache, f->position + m, k, v);
      }
    }
  }
  prefetch_next(f, step, thread);
  barrier(f, thread);
}

/* A strip of panel pairs at a time: gate and up go through a small buffer into the activation. */
static void gate_up(forward* f, const elm_step* step, int32_t thread) {
  elm_session* s = f->session;
  const elm_q8* x = f->is_small ? &s->threads[thread].hidden : &s->q_hidden;
  float* strip = s->threads[thread].strip;
  piece p = {0};
  while (next_piece(f, step, thread, step->matrix.num_panels / 2, 1, &p)) {
    for (size_t pair = p.first; pair < p.last; pair += ELM_STRIP_PAIRS) {
      const size_t end = p.last - pair < ELM_STRIP_PAIRS ? p.last : pair + ELM_STRIP_PAIRS;
      multiply(f, &step->matrix, x, 2 * pair, 2 * end, 2 * pair, strip, ELM_STRIP_COLS);
      for (size_t m = 0; m < f->num_rows; ++m) {
        const elm_glu_args args = {strip + m * ELM_STRIP_COLS,
                                   s->ffn + m * s->sizes.ffn + pair * ELM_PANEL_ROWS, end - pair,
                                   f->model->arch->activation == ELM_ACTIVATION_GELU_TANH};
        f->model->kernels.glu_f32(&args);
      }
    }
  }
  prefetch_next(f, step, thread);
  barrier(f, thread);
}

/* The last layer's output joins the residual stream; the newest token's is kept for the head. */
static void final(forward* f, const elm_step* step, int32_t thread) {
  elm_session* s = f->session;
  size_t first, last;
  rows_of(f, thread, &first, &last);
  for (size_t m = first; m < last; ++m) {
    float* x = residual(f, thread) + m * s->sizes.hidden;
    add_output(f, step, thread, m, x);
    if (f->is_small && thread == 0) {
      memcpy(s->x + m * s->sizes.hidden, x, s->sizes.hidden * sizeof(float));
    }
    if (m + 1 == f->num_rows && (thread == 0 || !f->is_small)) {
      memcpy(s->last, x, s->sizes.hidden * sizeof(float));
    }
  }
  barrier(f, thread);
}

/* Logits of `count` (at most gemv_rows) hidden states into session->logits. */
static void head(forward* f, const elm_step* step, int32_t thread, const float* x, size_t count) {
  elm_session* s = f->session;
  const elm_arch* arch = f->model->arch;
  const elm_private* own = &s->threads[thread];
  forward small = *f; /* the same pass with few rows */
  small.is_small = true;
  small.num_rows = count;
  for (size_t m = 0; m < count; ++m) {
    rmsnorm(f, x + m * s->sizes.hidden, step->norm, (size_t)arch->hidden_size, own->norm);
    quantise(f, own->norm, (size_t)arch->hidden_size, &own->hidden, m);
  }
  piece p = {0};
  while (next_piece(f, step, thread, step->matrix.num_panels, 2, &p)) {
    multiply(&small, &step->matrix, &own->hidden, p.first, p.last, 0, s->logits, s->sizes.vocab);
  }
  barrier(f, thread);
}

/* Rows past the tokenizer's last id are padding: they are never sampled. */
static void mask_padding(const forward* f, float* logits) {
  const elm_arch* arch = f->model->arch;
  for (int32_t i = arch->num_tokens; i < arch->vocab_size; ++i) {
    logits[i] = -(float)INFINITY;
  }
}

static void newest_logits(forward* f, const elm_step* step, int32_t thread) {
  head(f, step, thread, f->session->last, 1);
  if (thread == 0) {
    mask_padding(f, f->session->logits);
  }
}

static void run_head(void* context, int32_t thread) {
  forward* f = context;
  newest_logits(f, &f->model->steps[f->model->num_steps - 1], thread);
}

/* The caller's logits, a few rows at a time. */
static void all_logits(forward* f, const elm_step* step, int32_t thread) {
  elm_session* s = f->session;
  const size_t vocab = (size_t)f->model->arch->vocab_size;
  const size_t most = f->model->kernels.gemv_rows;
  for (size_t done = 0; done < f->num_logits; done += most) {
    const size_t left = f->num_logits - done;
    const size_t count = left < most ? left : most;
    const size_t row = f->num_rows - left;
    head(f, step, thread, s->x + row * s->sizes.hidden, count);
    if (thread == 0) {
      for (size_t m = 0; m < count; ++m) {
        mask_padding(f, s->logits + m * s->sizes.vocab);
        memcpy(f->logits + (done + m) * vocab, s->logits + m * s->sizes.vocab,
               vocab * sizeof(float));
      }
      if (left == count && count > 1) { /* the newest row stays where it is looked for */
        memcpy(s->logits, s->logits + (count - 1) * s->sizes.vocab, vocab * sizeof(float));
      }
      atomic_store_explicit(&s->claims[step - f->model->steps], 0, memory_order_relaxed);
    }
    barrier(f, thread);
  }
}

static void run_pass(void* context, int32_t thread) {
  forward* f = context;
  elm_session* s = f->session;
  for (size_t i = 0; i < f->model->num_steps; ++i) {
    const elm_step* step = &f->model->steps[i];
    const elm_arch* arch = f->model->arch;
    const elm_q8* q;
    switch (step->kind) {
      case ELM_STEP_EMBED: embed(f, thread); break;
      case ELM_STEP_NORM: norm(f, step, thread); break;
      case ELM_STEP_QKV: qkv(f, step, thread); break;
      case ELM_STEP_ATTENTION: elm_attention_step(f, step, thread); break;
      case ELM_STEP_OUT:
        q = quantise_rows(f, thread, s->attended, s->sizes.attended,
                          (size_t)arch->num_heads * (size_t)arch->head_dim,
                          &s->threads[thread].attended, &s->q_attended);
        multiply_shared(f, step, thread, q, s->y, s->sizes.hidden);
        break;
      case ELM_STEP_GATE_UP: gate_up(f, step, thread); break;
      case ELM_STEP_DOWN:
        q = quantise_rows(f, thread, s->ffn, s->sizes.ffn, (size_t)arch->ffn_size,
                          &s->threads[thread].ffn, &s->q_ffn);
        multiply_shared(f, step, thread, q, s->y, s->sizes.hidden);
        break;
      case ELM_STEP_FINAL: final(f, step, thread); break;
      case ELM_STEP_HEAD:
        if (f->num_logits > 0) {
          all_logits(f, step, thread);
        } else if (f->wants_newest) {
          newest_logits(f, step, thread);
        }
        break;
    }
  }
}

static void reset_claims(elm_session* s) {
  for (size_t i = 0; i < s->model->num_steps; ++i) {
    atomic_store_explicit(&s->claims[i], 0, memory_order_relaxed);
  }
}

elm_status elm_forward(elm_session* session, size_t count, float* logits, size_t num_logits,
                       bool wants_newest, elm_error* error) {
  const elm_model* model = session->model;
  const size_t half = (size_t)model->arch->head_dim / 2;
  const bool is_small = count <= model->kernels.gemv_rows;
  forward f = {
      .session = session,
      .model = model,
      .num_rows = count,
      .position = session->num_computed,
      .is_small = is_small,
      .num_threads = is_small ? session->decode_threads : session->prefill_threads,
      .logits = logits,
      .num_logits = logits == NULL ? 0 : num_logits,
      .wants_newest = wants_newest,
  };
  for (size_t j = 0; j < (size_t)model->arch->num_ropes; ++j) {
    for (size_t m = 0; m < count; ++m) {
      const size_t at = (j * session->chunk_length + m) * half;
      elm_rope_table((uint32_t)(f.position + m), model->inv_freq[j], half, session->cosine + at,
                     session->sine + at);
    }
  }
  reset_claims(session);
  const elm_status status = elm_pool_run(model->pool, f.num_threads, run_pass, &f, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  session->num_computed += count;
  session->hidden_at = session->num_computed;
  session->logits_at = f.num_logits > 0 || wants_newest ? session->num_computed : 0;
  session->num_passes += 1;
  session->num_barriers += f.num_barriers;
  return ELM_STATUS_OK;
}

elm_status elm_forward_head(elm_session* session, elm_error* error) {
  forward f = {
      .session = session,
      .model = session->model,
      .num_rows = 1,
      .is_small = true,
      .num_threads = session->decode_threads,
  };
  reset_claims(session);
  const elm_status status = elm_pool_run(session->model->pool, f.num_threads, run_head, &f, error);
  if (status == ELM_STATUS_OK) {
    session->logits_at = session->hidden_at;
    session->num_barriers += f.num_barriers;
  }
  return status;
}
