/* An open model: the mapped file, the chosen kernels, the thread pool and the plan. */
#ifndef ELM_RUNTIME_MODEL_H
#define ELM_RUNTIME_MODEL_H

#include "base/threads.h"
#include "format/file.h"
#include "kernels/kernels.h"

/* A weight matrix with the rows of kernels that compute it. */
typedef struct elm_matrix {
  const elm_tensor* tensor;
  size_t panel_bytes;
  size_t num_panels;
  void (*gemv)(const elm_matmul_args* arguments);
  void (*gemm)(const elm_matmul_args* arguments);
  const char* gemv_name;
  const char* gemm_name;
} elm_matrix;

typedef enum elm_step_kind {
  ELM_STEP_EMBED,     /* ids -> x */
  ELM_STEP_NORM,      /* x += post_norm(y); q8 = quant(norm(x)) */
  ELM_STEP_QKV,       /* q8 -> q, and k, v into the cache */
  ELM_STEP_ATTENTION, /* q, cache -> attended */
  ELM_STEP_OUT,       /* y = o * quant(attended) */
  ELM_STEP_GATE_UP,   /* q8 -> ffn = activation(gate) * up */
  ELM_STEP_DOWN,      /* y = down * quant(ffn) */
  ELM_STEP_FINAL,     /* x += post_norm(y), kept for the head */
  ELM_STEP_HEAD       /* logits = head * quant(norm(x)) */
} elm_step_kind;

/* One fused step; the runtime walks a flat list of them. Fields a step does not use are zero. */
typedef struct elm_step {
  elm_step_kind kind;
  int32_t layer; /* -1: none */
  int32_t rope;
  int32_t window;
  bool has_residual;      /* NORM, FINAL: y is added */
  const float* post_norm; /* applied to y before */
  const float* norm;
  const float* bias;
  const float* q_norm;
  const float* k_norm;
  elm_matrix matrix;
} elm_step;

struct elm_model {
  elm_allocator allocator;
  elm_file* file;
  const elm_arch* arch;
  elm_kernels kernels;
  elm_pool* pool;
  const elm_tensor* embedding;
  const float* embed_scale; /* (hidden) factors of its columns, or NULL */
  const float** inv_freq;   /* (num_ropes) tables of (head_dim / 2) */
  elm_step* steps;
  size_t num_steps;
  uint64_t weight_bytes_per_token;
};

/* Builds model->steps from the file; part of elm_model_open. */
elm_status elm_plan_build(elm_model* model, elm_error* error);
/* Appends the plan as text; returns the full length. */
size_t elm_plan_print(const elm_model* model, char* text, size_t capacity);

#endif
