/* The reader of .edge files. Distrusts every byte: all offsets, sizes and counts are checked before
 * anything is allocated or touched, and an error names the section. */
#ifndef ELM_FORMAT_FILE_H
#define ELM_FORMAT_FILE_H

#include "base/status.h"
#include "edgellm/edgellm.h"

/* A tensor that lies in the map; data is valid until elm_file_close. */
typedef struct elm_tensor {
  char name[65];
  elm_format format;
  uint32_t section; /* its number in the section table */
  uint64_t rows;
  uint64_t cols;
  const void* data;
  uint64_t size; /* bytes */
} elm_tensor;

typedef enum elm_activation {
  ELM_ACTIVATION_SILU = 0,
  ELM_ACTIVATION_GELU_TANH = 1
} elm_activation;

typedef struct elm_layer_arch {
  int32_t rope;   /* which rope.{j}.inv_freq */
  int32_t window; /* 0: no limit; else a query at position p sees p - window + 1 .. p */
} elm_layer_arch;

/* META's "model" object; every field is present in the file, none has a default. */
typedef struct elm_arch {
  char architecture[32];
  int32_t hidden_size;
  int32_t num_layers;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t ffn_size;
  int32_t vocab_size;
  int32_t num_tokens;
  int32_t max_context;
  int32_t num_ropes;
  elm_activation activation;
  float norm_eps;
  float attention_scale;
  float embedding_scale;
  bool is_tied;
  bool has_qkv_bias;
  bool has_qk_norm;
  bool has_post_norms;
  bool has_embed_scale;   /* the embedding's columns have a factor each */
  bool has_hadamard;      /* inputs of matrices are transformed before they are rounded */
  bool is_kv_int8;        /* the cache a session has if nothing else is asked for; else float16 */
  elm_layer_arch* layers; /* (num_layers) */
} elm_arch;

typedef struct elm_file elm_file;

/* Opens, maps and checks `path`. `verify_weights` also checks the CRC of the WEIGHTS sections. */
elm_status elm_file_open(const char* path, bool verify_weights, const elm_allocator* allocator,
                         elm_file** out, elm_error* error);
/* The same over bytes in memory, which the caller keeps alive; the fuzz target uses it. `data` is
 * aligned to 64 bytes. */
elm_status elm_file_open_memory(const uint8_t* data, size_t size, bool verify_weights,
                                const elm_allocator* allocator, elm_file** out, elm_error* error);
void elm_file_close(elm_file* file);

const elm_arch* elm_file_arch(const elm_file* file);
/* NULL if there is none of that name. */
const elm_tensor* elm_file_tensor(const elm_file* file, const char* name);
/* Tensor `name` with exactly this shape, and a format out of the bit mask `formats` (1 << format);
 * otherwise an ELM_STATUS_FORMAT error that names it. */
elm_status elm_file_require(const elm_file* file, const char* name, uint32_t formats, uint64_t rows,
                            uint64_t cols, const elm_tensor** out, elm_error* error);
size_t elm_file_num_tensors(const elm_file* file);
const elm_tensor* elm_file_tensor_at(const elm_file* file, size_t index);
uint64_t elm_file_bytes(const elm_file* file);
uint64_t elm_file_weight_bytes(const elm_file* file);
const uint8_t* elm_file_model_id(const elm_file* file); /* 32 bytes */

#endif
