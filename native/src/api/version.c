#include <stddef.h>
#include <stdio.h>

#include "edgellm/edgellm.h"

const char* elm_version(void) { return ELM_VERSION; }

uint32_t elm_abi_version(void) { return ELM_ABI_VERSION; }

typedef struct writer {
  char* text;
  size_t capacity;
  size_t length;
} writer;

static void write_item(writer* w, const char* format, const char* name, size_t value) {
  const int has_room = w->length < w->capacity;
  const int count = snprintf(has_room ? w->text + w->length : NULL,
                             has_room ? w->capacity - w->length : 0, format, name, value);
  w->length += count > 0 ? (size_t)count : 0;
}

size_t elm_abi_layout(char* text, size_t capacity) {
  writer w = {text, capacity, 0};
#define STRUCT(type) write_item(&w, w.length == 0 ? "%s %zu" : "\n%s %zu", #type, sizeof(type))
#define FIELD(type, field) write_item(&w, " %s %zu", #field, offsetof(type, field))
  STRUCT(elm_error);
  FIELD(elm_error, code);
  FIELD(elm_error, message);
  STRUCT(elm_allocator);
  FIELD(elm_allocator, context);
  FIELD(elm_allocator, allocate);
  FIELD(elm_allocator, release);
  STRUCT(elm_model_options);
  FIELD(elm_model_options, struct_size);
  FIELD(elm_model_options, num_threads);
  FIELD(elm_model_options, isa);
  FIELD(elm_model_options, verify);
  FIELD(elm_model_options, reserved);
  FIELD(elm_model_options, allocator);
  FIELD(elm_model_options, log);
  FIELD(elm_model_options, log_context);
  STRUCT(elm_model_info);
  FIELD(elm_model_info, struct_size);
  FIELD(elm_model_info, num_layers);
  FIELD(elm_model_info, hidden_size);
  FIELD(elm_model_info, num_heads);
  FIELD(elm_model_info, num_kv_heads);
  FIELD(elm_model_info, head_dim);
  FIELD(elm_model_info, ffn_size);
  FIELD(elm_model_info, vocab_size);
  FIELD(elm_model_info, num_tokens);
  FIELD(elm_model_info, max_context);
  FIELD(elm_model_info, num_threads);
  FIELD(elm_model_info, reserved);
  FIELD(elm_model_info, file_bytes);
  FIELD(elm_model_info, weight_bytes);
  FIELD(elm_model_info, weight_bytes_per_token);
  FIELD(elm_model_info, model_id);
  FIELD(elm_model_info, isa);
  STRUCT(elm_session_options);
  FIELD(elm_session_options, struct_size);
  FIELD(elm_session_options, context_length);
  FIELD(elm_session_options, chunk_length);
  FIELD(elm_session_options, kv_format);
  FIELD(elm_session_options, decode_threads);
  FIELD(elm_session_options, prefill_threads);
  STRUCT(elm_session_info);
  FIELD(elm_session_info, struct_size);
  FIELD(elm_session_info, context_length);
  FIELD(elm_session_info, num_tokens);
  FIELD(elm_session_info, chunk_length);
  FIELD(elm_session_info, kv_format);
  FIELD(elm_session_info, decode_threads);
  FIELD(elm_session_info, prefill_threads);
  FIELD(elm_session_info, reserved);
  FIELD(elm_session_info, kv_bytes);
  FIELD(elm_session_info, scratch_bytes);
  FIELD(elm_session_info, num_passes);
  FIELD(elm_session_info, num_barriers);
  STRUCT(elm_sampling);
  FIELD(elm_sampling, struct_size);
  FIELD(elm_sampling, temperature);
  FIELD(elm_sampling, top_k);
  FIELD(elm_sampling, top_p);
  FIELD(elm_sampling, min_p);
  FIELD(elm_sampling, repetition_penalty);
  FIELD(elm_sampling, presence_penalty);
  FIELD(elm_sampling, frequency_penalty);
  FIELD(elm_sampling, seed);
  FIELD(elm_sampling, bias_ids);
  FIELD(elm_sampling, bias_values);
  FIELD(elm_sampling, num_bias);
  FIELD(elm_sampling, reserved);
  STRUCT(elm_kernel_info);
  FIELD(elm_kernel_info, struct_size);
  FIELD(elm_kernel_info, is_compiled);
  FIELD(elm_kernel_info, is_supported);
  FIELD(elm_kernel_info, is_chosen);
  FIELD(elm_kernel_info, op);
  FIELD(elm_kernel_info, name);
  FIELD(elm_kernel_info, isa);
  FIELD(elm_kernel_info, reason);
#undef STRUCT
#undef FIELD
  return w.length;
}
