#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "kernels/tile.h"
#include "runtime/model.h"

enum {
  F32 = 1 << ELM_FORMAT_F32,
  QUANTIZED = 1 << ELM_FORMAT_E4 | 1 << ELM_FORMAT_E5 | 1 << ELM_FORMAT_E8,
};

/* Looks tensors up by name and remembers the first failure. */
typedef struct lookup {
  elm_model* model;
  elm_error* error;
  elm_status status;
} lookup;

static const elm_tensor* find(lookup* l, uint32_t formats, uint64_t rows, uint64_t cols,
                              const char* pattern, ...) __attribute__((format(printf, 5, 6)));

static const elm_tensor* find(lookup* l, uint32_t formats, uint64_t rows, uint64_t cols,
                              const char* pattern, ...) {
  char name[65];
  const elm_tensor* tensor = NULL;
  va_list arguments;
  va_start(arguments, pattern);
  (void)vsnprintf(name, sizeof name, pattern, arguments);
  va_end(arguments);
  if (l->status == ELM_STATUS_OK) {
    l->status = elm_file_require(l->model->file, name, formats, rows, cols, &tensor, l->error);
  }
  return tensor;
}

static const float* vector(const elm_tensor* tensor) {
  return tensor == NULL ? NULL : (const float*)tensor->data;
}

static elm_matrix matrix(lookup* l, const elm_tensor* tensor) {
  elm_matrix m = {0};
  if (tensor == NULL) {
    return m;
  }
  const elm_kernels* kernels = &l->model->kernels;
  const size_t num_cols = (size_t)((tensor->cols + ELM_GROUP - 1) / ELM_GROUP * ELM_GROUP);
  m.tensor = tensor;
  m.panel_bytes = elm_panel_bytes(tensor->format, num_cols);
  m.num_panels = (size_t)((tensor->rows + ELM_PANEL_ROWS - 1) / ELM_PANEL_ROWS);
  switch (tensor->format) {
#define ELM_PRODUCTS(FORMAT, format)                       \
  case ELM_FORMAT_##FORMAT:                                \
    m.gemv = kernels->gemv_q8_##format;                    \
    m.gemm = kernels->gemm_q8_##format;                    \
    m.gemv_name = kernels->names[ELM_OP_gemv_q8_##format]; \
    m.gemm_name = kernels->names[ELM_OP_gemm_q8_##format]; \
    break
    ELM_PRODUCTS(E4, e4);
    ELM_PRODUCTS(E5, e5);
    ELM_PRODUCTS(E8, e8);
#undef ELM_PRODUCTS
    case ELM_FORMAT_F32: break; /* find refused it */
  }
  l->model->weight_bytes_per_token += tensor->size;
  return m;
}

/* Adds the steps of one layer; post_norm is the norm on the previous layer's output, if any. */
static elm_step* add_layer(lookup* l, elm_step* step, int32_t i, const float* previous_post_norm) {
  const elm_arch* arch = l->model->arch;
  const elm_layer_arch* layer = &arch->layers[i];
  const uint64_t hidden = (uint64_t)arch->hidden_size;
  const uint64_t head_dim = (uint64_t)arch->head_dim;
  const uint64_t attended = (uint64_t)arch->num_heads * head_dim;
  const uint64_t qkv = attended + 2 * (uint64_t)arch->num_kv_heads * head_dim;
  const uint64_t ffn = (uint64_t)arch->ffn_size;
  const uint64_t ffn_rows = (ffn + 15) / 16 * 16;

  *step = (elm_step){.kind = ELM_STEP_NORM, .layer = i, .has_residual = i > 0};
  step->post_norm = previous_post_norm;
  step->norm = vector(find(l, F32, 1, hidden, "layers.%d.attn_norm", i));
  ++step;
  *step = (elm_step){.kind = ELM_STEP_QKV, .layer = i, .rope = layer->rope};
  step->matrix = matrix(l, find(l, QUANTIZED, qkv, hidden, "layers.%d.qkv", i));
  if (arch->has_qkv_bias) {
    step->bias = vector(find(l, F32, 1, qkv, "layers.%d.qkv_bias", i));
  }
  if (arch->has_qk_norm) {
    step->q_norm = vector(find(l, F32, 1, head_dim, "layers.%d.q_norm", i));
    step->k_norm = vector(find(l, F32, 1, head_dim, "layers.%d.k_norm", i));
  }
  ++step;
  *step++ = (elm_step){.kind = ELM_STEP_ATTENTION, .layer = i, .window = layer->window};
  *step = (elm_step){.kind = ELM_STEP_OUT, .layer = i};
  step->matrix = matrix(l, find(l, QUANTIZED, hidden, attended, "layers.%d.o", i));
  ++step;
  *step = (elm_step){.kind = ELM_STEP_NORM, .layer = i, .has_residual = true};
  if (arch->has_post_norms) {
    step->post_norm = vector(find(l, F32, 1, hidden, "layers.%d.post_attn_norm", i));
  }
  step->norm = vector(find(l, F32, 1, hidden, "layers.%d.ffn_norm", i));
  ++step;
  *step = (elm_step){.kind = ELM_STEP_GATE_UP, .layer = i};
  step->matrix = matrix(l, find(l, QUANTIZED, 2 * ffn_rows, hidden, "layers.%d.gate_up", i));
  ++step;
  *step = (elm_step){.kind = ELM_STEP_DOWN, .layer = i};
  step->matrix = matrix(l, find(l, QUANTIZED, hidden, ffn, "layers.%d.down", i));
  ++step;
  return step;
}

elm_status elm_plan_build(elm_model* model, elm_error* error) {
  enum { STEPS_PER_LAYER = 7, OTHER_STEPS = 3 };
  const elm_arch* arch = model->arch;
  const uint64_t hidden = (uint64_t)arch->hidden_size;
  const uint64_t vocab = (uint64_t)arch->vocab_size;
  lookup l = {model, error, ELM_STATUS_OK};
  model->num_steps = (size_t)arch->num_layers * STEPS_PER_LAYER + OTHER_STEPS;
  model->steps =
      model->allocator.allocate(model->allocator.context, model->num_steps * sizeof(elm_step), 64);
  model->inv_freq = model->allocator.allocate(model->allocator.context,
                                              (size_t)arch->num_ropes * sizeof(const float*), 64);
  if (model->steps == NULL || model->inv_freq == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for a plan of %zu steps",
                    model->num_steps);
  }
  for (int32_t j = 0; j < arch->num_ropes; ++j) {
    model->inv_freq[j] =
        vector(find(&l, F32, 1, (uint64_t)arch->head_dim / 2, "rope.%d.inv_freq", j));
  }
  model->embedding = find(&l, QUANTIZED, vocab, hidden, "embed");
  if (arch->has_embed_scale) {
    model->embed_scale = vector(find(&l, F32, 1, hidden, "embed_scale"));
  }
  elm_step* step = model->steps;
  *step++ = (elm_step){.kind = ELM_STEP_EMBED, .layer = -1};
  const float* post_norm = NULL;
  for (int32_t i = 0; i < arch->num_layers; ++i) {
    step = add_layer(&l, step, i, post_norm);
    if (arch->has_post_norms) {
      post_norm = vector(find(&l, F32, 1, hidden, "layers.%d.post_ffn_norm", i));
    }
  }
  *step++ =
      (elm_step){.kind = ELM_STEP_FINAL, .layer = -1, .has_residual = true, .post_norm = post_norm};
  *step = (elm_step){.kind = ELM_STEP_HEAD, .layer = -1};
  step->norm = vector(find(&l, F32, 1, hidden, "final_norm"));
  step->matrix =
      matrix(&l, arch->is_tied ? model->embedding : find(&l, QUANTIZED, vocab, hidden, "head"));
  return l.status;
}

/* snprintf that keeps counting past the end. */
typedef struct printer {
  char* text;
  size_t capacity;
  size_t length;
} printer;

static void print(printer* p, const char* format, ...) __attribute__((format(printf, 2, 3)));

static void print(printer* p, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const bool has_room = p->length < p->capacity;
  const int count = vsnprintf(has_room ? p->text + p->length : NULL,
                              has_room ? p->capacity - p->length : 0, format, arguments);
  va_end(arguments);
  p->length += count > 0 ? (size_t)count : 0;
}

static const char* format_name(const elm_tensor* tensor) {
  static const char* const names[] = {"F32", "E4", "E8", "E5"}; /* in the order of elm_format */
  return names[tensor->format];
}

static void print_matrix(printer* p, const elm_matrix* m) {
  print(p, "%s %s (%llu, %llu) %s | %s", m->tensor->name, format_name(m->tensor),
        (unsigned long long)m->tensor->rows, (unsigned long long)m->tensor->cols, m->gemv_name,
        m->gemm_name);
}

static void print_step(printer* p, const elm_model* model, const elm_step* step) {
  const char* const* names = model->kernels.names;
  const char* transformed = model->arch->has_hadamard ? ", input transformed" : "";
  if (step->layer >= 0) {
    print(p, "%3d ", step->layer);
  } else {
    print(p, "  - ");
  }
  switch (step->kind) {
    case ELM_STEP_EMBED:
      print(p, "embed      ids -> x: %s %s (%llu, %llu)", model->embedding->name,
            format_name(model->embedding), (unsigned long long)model->embedding->rows,
            (unsigned long long)model->embedding->cols);
      if (model->arch->has_hadamard && model->arch->is_tied) {
        print(p, ", %s", names[ELM_OP_hadamard_f32]);
      }
      print(p, "%s", model->embed_scale != NULL ? ", scaled" : "");
      break;
    case ELM_STEP_NORM:
      print(p, "norm       x%s -> q8: %s, %s%s",
            !step->has_residual ? ""
            : step->post_norm   ? " + norm(y)"
                                : " + y",
            names[ELM_OP_rmsnorm_f32], names[ELM_OP_quant_q8], transformed);
      break;
    case ELM_STEP_QKV:
      print(p, "qkv        q8 -> q, kv: ");
      print_matrix(p, &step->matrix);
      print(p, "%s%s, rope %d, %s, barrier", step->bias ? ", bias" : "",
            step->q_norm ? ", q/k norm" : "", step->rope,
            names[model->arch->is_kv_int8 ? ELM_OP_kv_store_q8 : ELM_OP_kv_store_f16]);
      break;
    case ELM_STEP_ATTENTION:
      print(p, "attention  q, kv -> a: %s",
            names[model->arch->is_kv_int8 ? ELM_OP_attention_q8 : ELM_OP_attention_f16]);
      if (step->window > 0) {
        print(p, ", window %d", step->window);
      }
      print(p, ", barrier");
      break;
    case ELM_STEP_OUT:
      print(p, "out        quant(a) -> y: ");
      print_matrix(p, &step->matrix);
      print(p, "%s, barrier", transformed);
      break;
    case ELM_STEP_GATE_UP:
      print(p, "gate_up    q8 -> h: ");
      print_matrix(p, &step->matrix);
      print(p, ", %s %s, barrier",
            model->arch->activation == ELM_ACTIVATION_SILU ? "silu" : "gelu_tanh",
            names[ELM_OP_glu_f32]);
      break;
    case ELM_STEP_DOWN:
      print(p, "down       quant(h) -> y: ");
      print_matrix(p, &step->matrix);
      print(p, "%s, barrier", transformed);
      break;
    case ELM_STEP_FINAL:
      print(p, "final      x + %s -> x, barrier", step->post_norm ? "norm(y)" : "y");
      break;
    case ELM_STEP_HEAD:
      print(p, "head       quant(norm(x)) -> logits: ");
      print_matrix(p, &step->matrix);
      print(p, "%s, barrier", transformed);
      break;
  }
  print(p, "\n");
}

size_t elm_plan_print(const elm_model* model, char* text, size_t capacity) {
  printer p = {text, capacity, 0};
  for (size_t i = 0; i < model->num_steps; ++i) {
    print_step(&p, model, &model->steps[i]);
  }
  return p.length;
}
