#include "format/meta.h"

#include <stdio.h>
#include <string.h>

#include "format/json.h"
#include "format/limits.h"

/* Where to write what is wrong. */
typedef struct report {
  char* text;
  size_t capacity;
} report;

static bool fail(const report* out, const char* path, const char* key, const char* what) {
  (void)snprintf(out->text, out->capacity, "%s%s %s", path, key, what);
  return false;
}

static bool read_integer(const report* out, elm_json parent, const char* path, const char* key,
                         int64_t least, int64_t most, int32_t* value) {
  elm_json item;
  int64_t read;
  if (!elm_json_member(parent, key, &item) || !elm_json_integer(item, &read)) {
    return fail(out, path, key, "is missing or not an integer");
  }
  if (read < least || read > most) {
    return fail(out, path, key, "is out of range");
  }
  *value = (int32_t)read;
  return true;
}

static bool read_float(const report* out, elm_json model, const char* key, double least,
                       double most, float* value) {
  elm_json item;
  double read;
  if (!elm_json_member(model, key, &item) || !elm_json_number(item, &read)) {
    return fail(out, "model.", key, "is missing or not a number");
  }
  if (!(read >= least && read <= most)) {
    return fail(out, "model.", key, "is out of range");
  }
  *value = (float)read;
  return true;
}

static bool read_flag(const report* out, elm_json model, const char* key, bool* value) {
  elm_json item;
  if (!elm_json_member(model, key, &item) || !elm_json_boolean(item, value)) {
    return fail(out, "model.", key, "is missing or not true or false");
  }
  return true;
}

/* A flag that files without it do not have. */
static bool read_optional_flag(const report* out, elm_json model, const char* key, bool* value) {
  elm_json item;
  *value = false;
  return !elm_json_member(model, key, &item) || read_flag(out, model, key, value);
}

static bool read_architecture(const report* out, elm_json model, elm_arch* arch) {
  elm_json item;
  if (!elm_json_member(model, "architecture", &item) ||
      !elm_json_string(item, arch->architecture, ELM_MAX_ARCHITECTURE_BYTES + 1) ||
      arch->architecture[0] == 0 ||
      strspn(arch->architecture, "abcdefghijklmnopqrstuvwxyz0123456789_") !=
          strlen(arch->architecture)) {
    return fail(out, "model.", "architecture", "is missing or not a name");
  }
  return true;
}

static bool read_activation(const report* out, elm_json model, elm_arch* arch) {
  elm_json item;
  char name[16];
  if (!elm_json_member(model, "activation", &item) || !elm_json_string(item, name, sizeof name)) {
    return fail(out, "model.", "activation", "is missing or not a known name");
  }
  const bool is_gelu = strcmp(name, "gelu_tanh") == 0;
  if (!is_gelu && strcmp(name, "silu") != 0) {
    return fail(out, "model.", "activation", "is neither silu nor gelu_tanh");
  }
  arch->activation = is_gelu ? ELM_ACTIVATION_GELU_TANH : ELM_ACTIVATION_SILU;
  return true;
}

static bool read_kv_format(const report* out, elm_json model, elm_arch* arch) {
  elm_json item;
  char name[8];
  if (!elm_json_member(model, "kv_format", &item) || !elm_json_string(item, name, sizeof name)) {
    return fail(out, "model.", "kv_format", "is missing or not a known name");
  }
  arch->is_kv_int8 = strcmp(name, "int8") == 0;
  if (!arch->is_kv_int8 && strcmp(name, "f16") != 0) {
    return fail(out, "model.", "kv_format", "is neither f16 nor int8");
  }
  return true;
}

static bool read_model(const report* out, elm_json model, elm_arch* arch) {
  const struct {
    const char* key;
    int64_t least;
    int64_t most;
    int32_t* value;
  } integers[] = {
      {"hidden_size", 1, ELM_MAX_HIDDEN_SIZE, &arch->hidden_size},
      {"num_layers", 1, ELM_MAX_LAYERS, &arch->num_layers},
      {"num_heads", 1, ELM_MAX_HEADS, &arch->num_heads},
      {"num_kv_heads", 1, ELM_MAX_HEADS, &arch->num_kv_heads},
      {"head_dim", ELM_HEAD_DIM_MULTIPLE, ELM_MAX_HEAD_DIM, &arch->head_dim},
      {"ffn_size", 1, ELM_MAX_FFN_SIZE, &arch->ffn_size},
      {"vocab_size", 1, ELM_MAX_VOCAB_SIZE, &arch->vocab_size},
      {"num_tokens", 1, ELM_MAX_VOCAB_SIZE, &arch->num_tokens},
      {"max_context", 1, ELM_MAX_CONTEXT, &arch->max_context},
      {"num_ropes", 1, ELM_MAX_ROPES, &arch->num_ropes},
  };
  for (size_t i = 0; i < sizeof integers / sizeof integers[0]; ++i) {
    if (!read_integer(out, model, "model.", integers[i].key, integers[i].least, integers[i].most,
                      integers[i].value)) {
      return false;
    }
  }
  if (!read_architecture(out, model, arch) || !read_activation(out, model, arch) ||
      !read_kv_format(out, model, arch) ||
      !read_float(out, model, "norm_eps", 1e-12, 1, &arch->norm_eps) ||
      !read_float(out, model, "attention_scale", 1e-6, 1e6, &arch->attention_scale) ||
      !read_float(out, model, "embedding_scale", 1e-6, 1e6, &arch->embedding_scale) ||
      !read_flag(out, model, "is_tied", &arch->is_tied) ||
      !read_flag(out, model, "has_qkv_bias", &arch->has_qkv_bias) ||
      !read_flag(out, model, "has_qk_norm", &arch->has_qk_norm) ||
      !read_flag(out, model, "has_post_norms", &arch->has_post_norms) ||
      !read_optional_flag(out, model, "has_embed_scale", &arch->has_embed_scale) ||
      !read_optional_flag(out, model, "has_hadamard", &arch->has_hadamard)) {
    return false;
  }
  if (arch->head_dim % ELM_HEAD_DIM_MULTIPLE != 0) {
    return fail(out, "model.", "head_dim", "is not a multiple of 16");
  }
  if (arch->num_heads % arch->num_kv_heads != 0) {
    return fail(out, "model.", "num_heads", "is not a multiple of num_kv_heads");
  }
  if (arch->has_hadamard &&
      (arch->hidden_size % ELM_GROUP_COLS != 0 || arch->ffn_size % ELM_GROUP_COLS != 0 ||
       arch->num_heads * arch->head_dim % ELM_GROUP_COLS != 0)) {
    return fail(out, "model.", "has_hadamard",
                "is set, and a matrix has columns that 32 does not divide");
  }
  if (arch->num_tokens > arch->vocab_size) {
    return fail(out, "model.", "num_tokens", "is larger than vocab_size");
  }
  return true;
}

static bool read_layers(const report* out, elm_json model, elm_arch* arch) {
  elm_json item;
  bool is_first = true;
  int32_t count = 0;
  if (!elm_json_member(model, "layers", &item)) {
    return fail(out, "model.", "layers", "is missing");
  }
  for (; elm_json_next(&item, &is_first); ++count) {
    char path[32];
    (void)snprintf(path, sizeof path, "model.layers[%d].", (int)count);
    if (count == arch->num_layers) {
      return fail(out, "model.", "layers", "has more entries than num_layers");
    }
    elm_layer_arch* layer = &arch->layers[count];
    if (!read_integer(out, item, path, "rope", 0, arch->num_ropes - 1, &layer->rope) ||
        !read_integer(out, item, path, "window", 0, ELM_MAX_CONTEXT, &layer->window)) {
      return false;
    }
  }
  return count == arch->num_layers
             ? true
             : fail(out, "model.", "layers", "has fewer entries than num_layers");
}

elm_status elm_meta_read(const char* text, size_t size, const elm_allocator* allocator,
                         elm_arch* arch, char* problem, size_t capacity) {
  const report out = {problem, capacity};
  elm_json meta;
  elm_json model;
  size_t position;
  *arch = (elm_arch){0};
  const char* wrong = elm_json_check(text, size, &meta, &position);
  if (wrong != NULL) {
    (void)snprintf(problem, capacity, "JSON is broken at byte %zu (%s)", position, wrong);
    return ELM_STATUS_FORMAT;
  }
  if (!elm_json_member(meta, "model", &model) || !elm_json_is_object(model)) {
    (void)fail(&out, "", "model", "is missing or not an object");
    return ELM_STATUS_FORMAT;
  }
  if (!read_model(&out, model, arch)) {
    return ELM_STATUS_FORMAT;
  }
  const size_t layer_bytes = (size_t)arch->num_layers * sizeof arch->layers[0];
  arch->layers = allocator->allocate(allocator->context, layer_bytes, 64);
  if (arch->layers == NULL) {
    (void)snprintf(problem, capacity, "%zu bytes of memory for it are not there", layer_bytes);
    return ELM_STATUS_OUT_OF_MEMORY;
  }
  if (!read_layers(&out, model, arch)) {
    allocator->release(allocator->context, arch->layers, layer_bytes);
    arch->layers = NULL;
    return ELM_STATUS_FORMAT;
  }
  return ELM_STATUS_OK;
}
