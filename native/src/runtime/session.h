/* A session: one sequence, its KV cache and the buffers of a forward pass. */
#ifndef ELM_RUNTIME_SESSION_H
#define ELM_RUNTIME_SESSION_H

#include <stdatomic.h>

#include "base/memory.h"
#include "runtime/kv_cache.h"
#include "runtime/model.h"

/* Padded sizes of a model's vectors, in floats. */
typedef struct elm_sizes {
  size_t hidden;   /* hidden_size up to a multiple of 32 */
  size_t attended; /* num_heads * head_dim up to a multiple of 32 */
  size_t qkv;      /* rows of qkv, a multiple of 16 */
  size_t ffn;      /* ffn_size up to a multiple of 32 */
  size_t vocab;    /* vocab_size up to a multiple of 16 */
} elm_sizes;

/* What a thread needs to compute a small pass without waiting for others: its own copy of the
 * residual stream and of the quantised activations. Every thread computes the same numbers. */
typedef struct elm_private {
  float* x;    /* (gemv_rows, hidden) */
  float* norm; /* (hidden) scratch row, used in large passes as well */
  elm_q8 hidden;
  elm_q8 attended;
  elm_q8 ffn;
  float* strip; /* (chunk, ELM_STRIP_COLS) gate and up before the activation */
} elm_private;

/* Columns of gate_up a thread computes before it applies the activation: 8 pairs of panels. */
enum { ELM_STRIP_PAIRS = 8, ELM_STRIP_COLS = ELM_STRIP_PAIRS * 2 * ELM_PANEL_ROWS };

struct elm_session {
  elm_model* model;
  elm_allocator allocator;
  void* memory;
  uint64_t memory_bytes;
  uint64_t kv_bytes;
  atomic_flag busy;

  size_t context_length;
  size_t chunk_length;
  int32_t decode_threads;
  int32_t prefill_threads;
  elm_sizes sizes;
  elm_kv_cache cache;

  int32_t* ids; /* (context_length) the sequence */
  size_t num_tokens;
  size_t num_computed;  /* in the KV cache */
  size_t num_generated; /* of the last tokens of the sequence */
  size_t hidden_at;     /* `last` holds the hidden state after this many tokens; 0: none */
  size_t logits_at;     /* `logits` belongs after this many tokens; 0: none */

  float* x;        /* (chunk, hidden) residual stream */
  float* y;        /* (chunk, hidden) output of out and down */
  float* qkv;      /* (chunk, qkv) */
  float* attended; /* (chunk, attended) */
  float* ffn;      /* (chunk, ffn) */
  float* last;     /* (hidden) hidden state of the newest computed token */
  float* logits;   /* (gemv_rows, vocab) */
  float* cosine;   /* (num_ropes, chunk, head_dim / 2) */
  float* sine;
  elm_q8 q_hidden; /* (chunk, hidden) */
  elm_q8 q_attended;
  elm_q8 q_ffn;
  float* parts; /* (num_heads, blocks of the cache, a part) of attention that threads share; NULL:
                   one token's heads keep all threads busy */
  elm_private* threads;  /* (the larger number of threads) */
  atomic_size_t* claims; /* (num_steps) work handed out so far, in units of the step */
  void* sampler_scratch;

  uint64_t num_passes;
  uint64_t num_barriers;
};

/* How queries of one key/value head, neighbouring tokens and the heads that share it, are cut into
 * calls of the attention kernel. */
static inline size_t elm_attention_tiles(const elm_arch* arch, size_t num_rows) {
  const size_t queries = num_rows * (size_t)(arch->num_heads / arch->num_kv_heads);
  return (queries + ELM_ATTENTION_MAX_QUERIES - 1) / ELM_ATTENTION_MAX_QUERIES;
}

/* Computes tokens [num_computed, num_computed + count), count <= chunk_length, which then are in
 * the cache. The last `num_logits` rows' logits go to `logits` (num_logits, vocab_size), if given;
 * the newest row's to session->logits if `wants_newest`. */
elm_status elm_forward(elm_session* session, size_t count, float* logits, size_t num_logits,
                       bool wants_newest, elm_error* error);
/* Logits of the hidden state in `last` -> session->logits. */
elm_status elm_forward_head(elm_session* session, elm_error* error);

#endif
