#include <string.h>

#include "base/memory.h"
#include "runtime/model.h"

enum { MAX_THREADS = 256 };

void elm_model_options_default(elm_model_options* options) {
  *options = (elm_model_options){.struct_size = sizeof *options};
}

/* The instruction sets to choose from: those that `name` implies, or the fast ones. */
static elm_status allowed_isas(const char* name, uint32_t* isas, elm_error* error) {
  *isas = elm_cpu_isas();
  if (name == NULL) {
    *isas = elm_kernels_fast_isas();
    return ELM_STATUS_OK;
  }
  elm_isa isa;
  if (!elm_isa_from_name(name, &isa)) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "unknown instruction set \"%.32s\"; known are ref, avx2, avxvnni, avx512vnni, "
                    "amx, neon, neon_dotprod and neon_i8mm",
                    name);
  }
  if (!(*isas >> isa & 1)) {
    return elm_fail(error, ELM_STATUS_UNSUPPORTED, "instruction set %s cannot be used: %s", name,
                    elm_isa_missing(isa));
  }
  *isas &= elm_isa_implied(isa);
  return ELM_STATUS_OK;
}

static void warn_if_slow(const elm_model* model, const elm_model_options* options) {
  if (options->log != NULL && model->kernels.isa == ELM_ISA_REF && options->isa == NULL) {
    options->log(options->log_context, 1,
                 "no fast kernels for this CPU (needs AVX2 with FMA, or NEON): running the scalar "
                 "reference, which is slow");
  }
}

elm_status elm_model_open(const char* path, const elm_model_options* options, elm_model** out,
                          elm_error* error) {
  if (out == NULL || path == NULL) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT, "elm_model_open needs a path and an out");
  }
  *out = NULL;
  elm_model_options defaults;
  if (options == NULL) {
    elm_model_options_default(&defaults);
    options = &defaults;
  }
  if (options->struct_size != sizeof *options) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "elm_model_options has the wrong struct_size: call elm_model_options_default");
  }
  if (options->num_threads < 0 || options->num_threads > MAX_THREADS) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT, "num_threads is %d; give 0 to %d",
                    options->num_threads, (int)MAX_THREADS);
  }
  const elm_allocator allocator =
      options->allocator != NULL ? *options->allocator : elm_allocator_default();
  uint32_t isas;
  elm_status status = allowed_isas(options->isa, &isas, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  elm_model* model = allocator.allocate(allocator.context, sizeof *model, 64);
  if (model == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for a model");
  }
  memset(model, 0, sizeof *model);
  model->allocator = allocator;
  elm_kernels_choose(isas, &model->kernels);
  status = elm_file_open(path, options->verify != 0, &allocator, &model->file, error);
  if (status == ELM_STATUS_OK) {
    model->arch = elm_file_arch(model->file);
    status = elm_plan_build(model, error);
  }
  if (status == ELM_STATUS_OK) {
    const int32_t threads = options->num_threads > 0 ? options->num_threads : elm_cpu_count("");
    status = elm_pool_create(threads < MAX_THREADS ? threads : MAX_THREADS, &allocator,
                             &model->pool, error);
  }
  if (status != ELM_STATUS_OK) {
    elm_model_close(model);
    return status;
  }
  warn_if_slow(model, options);
  *out = model;
  return ELM_STATUS_OK;
}

void elm_model_close(elm_model* model) {
  if (model == NULL) {
    return;
  }
  const elm_allocator allocator = model->allocator;
  elm_pool_destroy(model->pool);
  if (model->steps != NULL) {
    allocator.release(allocator.context, model->steps, model->num_steps * sizeof(elm_step));
  }
  if (model->inv_freq != NULL) {
    allocator.release(allocator.context, model->inv_freq,
                      (size_t)model->arch->num_ropes * sizeof(const float*));
  }
  elm_file_close(model->file);
  allocator.release(allocator.context, model, sizeof *model);
}

elm_status elm_model_get_info(const elm_model* model, elm_model_info* info, elm_error* error) {
  if (model == NULL || info == NULL || info->struct_size != sizeof *info) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "elm_model_get_info needs a model and an info with its struct_size set");
  }
  const elm_arch* arch = model->arch;
  *info = (elm_model_info){
      .struct_size = sizeof *info,
      .num_layers = arch->num_layers,
      .hidden_size = arch->hidden_size,
      .num_heads = arch->num_heads,
      .num_kv_heads = arch->num_kv_heads,
      .head_dim = arch->head_dim,
      .ffn_size = arch->ffn_size,
      .vocab_size = arch->vocab_size,
      .num_tokens = arch->num_tokens,
      .max_context = arch->max_context,
      .num_threads = elm_pool_num_threads(model->pool),
      .file_bytes = elm_file_bytes(model->file),
      .weight_bytes = elm_file_weight_bytes(model->file),
      .weight_bytes_per_token = model->weight_bytes_per_token,
  };
  memcpy(info->model_id, elm_file_model_id(model->file), sizeof info->model_id);
  (void)strncpy(info->isa, elm_isa_name(model->kernels.isa), sizeof info->isa - 1);
  return ELM_STATUS_OK;
}

elm_status elm_model_plan(const elm_model* model, char* text, size_t capacity, size_t* length,
                          elm_error* error) {
  if (model == NULL || length == NULL || (text == NULL && capacity > 0)) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "elm_model_plan needs a model, a buffer and a length");
  }
  *length = elm_plan_print(model, text, capacity);
  return ELM_STATUS_OK;
}
