/* A forward pass as its threads see it: what they compute, and how they share the work. */
#ifndef ELM_RUNTIME_PASS_H
#define ELM_RUNTIME_PASS_H

#include "runtime/session.h"

typedef struct forward {
  elm_session* session;
  const elm_model* model;
  size_t num_rows;
  size_t position; /* of row 0 */
  bool is_small;
  int32_t num_threads;
  float* logits; /* caller's, or NULL */
  size_t num_logits;
  bool wants_newest; /* the newest row's logits into session->logits */
  uint64_t num_barriers;
} forward;

static inline void barrier(forward* f, int32_t thread) {
  if (f->num_threads > 1) {
    elm_pool_barrier(f->model->pool);
  }
  if (thread == 0) {
    ++f->num_barriers;
  }
}

/* Units [first, last) of a step that a thread works on next. Three quarters of the units are split
 * evenly beforehand, so that each thread reads one long stream and knows early where it begins; the
 * rest is handed out in small pieces to whoever is free. */
typedef struct piece {
  size_t first;
  size_t last;
  bool is_begun;
} piece;

static inline size_t units_beforehand(const forward* f, size_t total) {
  return f->num_threads == 1 ? total : total / 4 * 3;
}

static inline size_t first_unit(const forward* f, size_t total, int32_t thread, size_t multiple) {
  const size_t split = units_beforehand(f, total);
  return split * (size_t)thread / (size_t)f->num_threads / multiple * multiple;
}

static inline bool next_piece(const forward* f, const elm_step* step, int32_t thread, size_t total,
                              size_t multiple, piece* p) {
  const size_t split = units_beforehand(f, total);
  if (!p->is_begun) {
    p->is_begun = true;
    p->first = first_unit(f, total, thread, multiple);
    p->last = thread + 1 == f->num_threads ? split : first_unit(f, total, thread + 1, multiple);
    if (p->first < p->last) {
      return true;
    }
  }
  const size_t rest = total - split;
  size_t count = multiple;
  if (f->is_small) { /* a unit takes too little time to be worth the trouble of taking it */
    const size_t share = rest / (4 * (size_t)f->num_threads);
    count = share < multiple ? multiple : (share + multiple - 1) / multiple * multiple;
  }
  const size_t taken = atomic_fetch_add_explicit(&f->session->claims[step - f->model->steps], count,
                                                 memory_order_relaxed);
  if (taken >= rest) {
    return false;
  }
  p->first = split + taken;
  p->last = rest - taken < count ? total : p->first + count;
  return true;
}

/* Units of a step that multiplies by a matrix, and panels in a unit. */
static inline size_t step_units(const forward* f, const elm_step* step, size_t* panels) {
  const elm_arch* arch = f->model->arch;
  switch (step->kind) {
    case ELM_STEP_QKV:
      *panels = (size_t)arch->head_dim / ELM_PANEL_ROWS;
      return (size_t)arch->num_heads + (size_t)arch->num_kv_heads;
    case ELM_STEP_GATE_UP: *panels = 2; return step->matrix.num_panels / 2;
    default: *panels = 1; return step->matrix.num_panels;
  }
}

/* Asks for the first lines of this thread's part of the next matrix, which it will read after the
 * barrier. The kernels ask for the lines after those as they go. */
static inline void prefetch_next(const forward* f, const elm_step* step, int32_t thread) {
  const elm_step* end = f->model->steps + f->model->num_steps;
  do {
    ++step;
  } while (step < end && step->matrix.tensor == NULL);
  if (step == end) {
    return;
  }
  size_t panels;
  const size_t units = step_units(f, step, &panels);
  const uint8_t* start =
      (const uint8_t*)step->matrix.tensor->data +
      first_unit(f, units, thread, panels == 1 ? 2 : 1) * panels * step->matrix.panel_bytes;
  for (size_t i = 0; i < ELM_PREFETCH_BYTES; i += 64) {
    __builtin_prefetch(start + i, 0, 3);
  }
}

/* Rows this thread works on in a step without barriers of its own. */
static inline void rows_of(const forward* f, int32_t thread, size_t* first, size_t* last) {
  if (f->is_small) {
    *first = 0;
    *last = f->num_rows;
  } else {
    *first = f->num_rows * (size_t)thread / (size_t)f->num_threads;
    *last = f->num_rows * (size_t)(thread + 1) / (size_t)f->num_threads;
  }
}

static inline float* residual(const forward* f, int32_t thread) {
  return f->is_small ? f->session->threads[thread].x : f->session->x;
}

/* Queries and the cache -> attended; ends with a barrier. */
void elm_attention_step(forward* f, const elm_step* step, int32_t thread);

#endif
