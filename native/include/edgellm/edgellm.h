/* edgellm: run INT4 language models on the device in front of you.
 *
 * The only public header of the C library. C99, no dependencies beyond the C standard library.
 *
 * Rules that hold for every function:
 *   - A fallible function returns an elm_status and takes an optional elm_error last; on failure
 *     it holds one line that says what was wrong, where, and what to do. Out-handles are NULL then.
 *   - Nothing prints, exits, aborts, reads the environment or touches global state.
 *   - Pointers passed in are borrowed until the call returns, unless stated otherwise.
 *   - Closing or destroying NULL does nothing.
 *   - Option structs begin with struct_size; fill them with the matching elm_*_default first.
 */
#ifndef EDGELLM_EDGELLM_H
#define EDGELLM_EDGELLM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define ELM_API __declspec(dllexport)
#else
#define ELM_API __attribute__((visibility("default")))
#endif

/* Raised whenever a struct layout or a function's meaning changes. */
#define ELM_ABI_VERSION 1

/* ---- status ---------------------------------------------------------------------------------- */

typedef enum elm_status {
  ELM_STATUS_OK = 0,
  ELM_STATUS_INVALID_ARGUMENT = 1, /* the caller's mistake */
  ELM_STATUS_IO = 2,               /* the operating system refused: open, map, read */
  ELM_STATUS_FORMAT = 3,           /* the file is not a valid .edge file */
  ELM_STATUS_UNSUPPORTED = 4,      /* valid, but this build or this CPU cannot do it */
  ELM_STATUS_OUT_OF_MEMORY = 5,
  ELM_STATUS_CONTEXT_FULL = 6, /* prompt or generation does not fit the session's context */
  ELM_STATUS_NONFINITE = 7,    /* a logit is NaN or infinite */
  ELM_STATUS_BUSY = 8          /* the session is in use by another thread */
} elm_status;

typedef struct elm_error {
  int32_t code; /* elm_status */
  char message[508];
} elm_error;

ELM_API const char* elm_status_name(elm_status status);
ELM_API const char* elm_version(void); /* "0.1.0" */
ELM_API uint32_t elm_abi_version(void);
/* One line per public struct, "name sizeof field offset field offset ...", for bindings to compare
 * with. Writes at most `capacity` bytes with the closing zero; returns the length without it. */
ELM_API size_t elm_abi_layout(char* text, size_t capacity);

/* ---- callbacks ------------------------------------------------------------------------------- */

/* allocate returns memory aligned to `alignment` (a power of two, at most 65,536) or NULL. */
typedef struct elm_allocator {
  void* context;
  void* (*allocate)(void* context, size_t size, size_t alignment);
  void (*release)(void* context, void* memory, size_t size);
} elm_allocator;

/* level: 0 information, 1 warning. May be called from the thread that called into the library. */
typedef void (*elm_log_fn)(void* context, int32_t level, const char* message);

/* ---- model: an open .edge file ---------------------------------------------------------------
 * Immutable after opening and shareable between threads and sessions. Weights are mapped read-only
 * and computed on where they lie. After it is closed its sessions may only be destroyed. */

typedef struct elm_model elm_model;

typedef struct elm_model_options {
  uint32_t struct_size;
  int32_t num_threads; /* in the model's pool; 0: one per CPU this process may use that has at
                          least half of the fastest one's capacity */
  const char* isa; /* NULL: the fastest supported; else "ref", "avx2", "avx512vnni", "amx", ... */
  int32_t verify;  /* 0: CRC of everything but the weights; 1: of the weights as well */
  int32_t reserved;
  const elm_allocator* allocator; /* NULL: the C library's; copied */
  elm_log_fn log;                 /* may be NULL */
  void* log_context;
} elm_model_options;

typedef struct elm_model_info {
  uint32_t struct_size;
  int32_t num_layers;
  int32_t hidden_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t ffn_size;
  int32_t vocab_size;  /* rows of the head: length of a logits vector */
  int32_t num_tokens;  /* ids the tokenizer knows; later rows are padding, their logits -inf */
  int32_t max_context; /* the longest context the model was made for, tokens */
  int32_t num_threads; /* in the model's pool */
  int32_t reserved;
  uint64_t file_bytes;
  uint64_t weight_bytes;           /* all WEIGHTS sections */
  uint64_t weight_bytes_per_token; /* read once per decoded token */
  uint8_t model_id[32];            /* SHA-256 of the section table */
  char isa[32];                    /* instruction set the kernels were chosen for */
} elm_model_info;

ELM_API void elm_model_options_default(elm_model_options* options);
ELM_API elm_status elm_model_open(const char* path, const elm_model_options* options,
                                  elm_model** out, elm_error* error);
ELM_API void elm_model_close(elm_model* model);
/* info->struct_size must be set. */
ELM_API elm_status elm_model_get_info(const elm_model* model, elm_model_info* info,
                                      elm_error* error);
/* The execution plan as text, one step a line. Writes at most `capacity` bytes with the closing
 * zero; *length receives the full length without it. */
ELM_API elm_status elm_model_plan(const elm_model* model, char* text, size_t capacity,
                                  size_t* length, elm_error* error);

/* ---- session: one sequence of tokens and its KV cache -----------------------------------------
 * Belongs to one thread at a time; simultaneous use returns ELM_STATUS_BUSY. Nothing is allocated
 * after elm_session_create. */

typedef struct elm_session elm_session;

typedef enum elm_kv_format {
  ELM_KV_DEFAULT = 0, /* what the file says costs next to nothing */
  ELM_KV_F16 = 1,
  ELM_KV_INT8 = 2 /* half the memory, faster attention */
} elm_kv_format;

typedef struct elm_session_options {
  uint32_t struct_size;
  int32_t context_length; /* tokens the KV cache holds; 0: the model's max_context */
  int32_t chunk_length;   /* most tokens computed in one pass; 0: chosen. Never changes a result */
  int32_t kv_format;      /* elm_kv_format */
  /* Threads of the model's pool that take part in passes of up to 4 tokens, 8 with AVX-512, and in
   * longer ones; 0: all. Never changes a result. */
  int32_t decode_threads;
  int32_t prefill_threads;
} elm_session_options;

typedef struct elm_session_info {
  uint32_t struct_size;
  int32_t context_length;
  int32_t num_tokens; /* in the sequence now */
  int32_t chunk_length;
  int32_t kv_format; /* elm_kv_format: F16 or INT8 */
  int32_t decode_threads;
  int32_t prefill_threads;
  int32_t reserved;
  uint64_t kv_bytes;      /* KV cache */
  uint64_t scratch_bytes; /* everything else */
  uint64_t num_passes;    /* forward passes since creation */
  uint64_t num_barriers;  /* thread barriers since creation */
} elm_session_info;

typedef struct elm_sampling {
  uint32_t struct_size;
  float temperature;        /* 0: greedy (the lowest id wins a tie) */
  int32_t top_k;            /* 0: off */
  float top_p;              /* (0, 1]; 1: off */
  float min_p;              /* [0, 1]; 0: off */
  float repetition_penalty; /* > 0; 1: off. Over the whole sequence */
  float presence_penalty;   /* 0: off. Over generated tokens */
  float frequency_penalty;  /* 0: off. Over generated tokens */
  uint64_t seed;
  const int32_t* bias_ids; /* added to logits before anything else */
  const float* bias_values;
  uint32_t num_bias;
  uint32_t reserved;
} elm_sampling;

ELM_API void elm_session_options_default(elm_session_options* options);
ELM_API elm_status elm_session_create(elm_model* model, const elm_session_options* options,
                                      elm_session** out, elm_error* error);
ELM_API void elm_session_destroy(elm_session* session);
/* Memory a session with these options would take, without creating it. */
ELM_API elm_status elm_session_bytes(const elm_model* model, const elm_session_options* options,
                                     uint64_t* kv_bytes, uint64_t* scratch_bytes, elm_error* error);
ELM_API elm_status elm_session_get_info(const elm_session* session, elm_session_info* info,
                                        elm_error* error);

/* Appends `num_ids` tokens to the sequence and computes them. If it does not fit, nothing changes.
 * `logits` may be NULL; else it receives the last `num_logits` (<= num_ids) positions' logits,
 * (num_logits, vocab_size) float32. */
ELM_API elm_status elm_session_prefill(elm_session* session, const int32_t* ids, size_t num_ids,
                                       float* logits, size_t num_logits, elm_error* error);

/* Samples the next token, appends it, and returns it in ids[0 .. *num_ids). The token is computed
 * by the next call that needs it, so that the last token of an answer costs no pass. The sequence
 * must hold at least one token. One or more tokens come back, at most `capacity`. */
ELM_API elm_status elm_session_step(elm_session* session, const elm_sampling* sampling,
                                    int32_t* ids, size_t capacity, size_t* num_ids,
                                    elm_error* error);

/* Logits (vocab_size) after the last token of the sequence. */
ELM_API elm_status elm_session_logits(elm_session* session, float* logits, elm_error* error);

/* Drops all tokens from position `num_tokens` on. */
ELM_API elm_status elm_session_truncate(elm_session* session, size_t num_tokens, elm_error* error);

ELM_API void elm_sampling_default(elm_sampling* sampling);
/* The sampler alone, on the caller's logits (num_logits). `history` is the whole sequence, of which
 * the last `num_generated` tokens were generated; `position` keys the random numbers. */
ELM_API elm_status elm_sample(const float* logits, size_t num_logits, const elm_sampling* sampling,
                              const int32_t* history, size_t num_history, size_t num_generated,
                              uint64_t position, int32_t* id, elm_error* error);

/* ---- this machine ---------------------------------------------------------------------------- */

typedef struct elm_kernel_info {
  uint32_t struct_size;
  int32_t is_compiled;  /* in this build */
  int32_t is_supported; /* by this CPU */
  int32_t is_chosen;    /* when nothing is forced */
  char op[32];
  char name[64];
  char isa[32];
  char reason[96]; /* why it is not supported; empty if it is */
} elm_kernel_info;

ELM_API size_t elm_kernel_count(void);
ELM_API elm_status elm_kernel_get(size_t index, elm_kernel_info* info, elm_error* error);
/* Read bandwidth in bytes per second over a buffer of `bytes`, with `num_threads` threads. */
ELM_API elm_status elm_probe_read(uint64_t bytes, int32_t num_threads, double* bytes_per_second,
                                  elm_error* error);

/* Int8 operations per second (a multiply and an add are two) that `num_threads` threads reach with
 * nothing but the multiply-accumulates of instruction set `isa`, on registers. */
ELM_API elm_status elm_probe_int8(const char* isa, int32_t num_threads, double* ops_per_second,
                                  elm_error* error);

/* ---- quantisation ---------------------------------------------------------------------------- */

typedef enum elm_format {
  ELM_FORMAT_F32 = 0,
  ELM_FORMAT_E4 = 1, /* 4.5 bits per weight; layout in ARCHITECTURE.md */
  ELM_FORMAT_E8 = 2, /* 8.125 bits per weight */
  ELM_FORMAT_E5 = 3  /* 5.5 bits per weight */
} elm_format;

/* Bytes of a (rows, cols) tensor in `format`, 0 if it is not representable. */
ELM_API uint64_t elm_tensor_bytes(elm_format format, uint64_t rows, uint64_t cols);
/* Quantises rows [first_row, first_row + num_rows) of a (rows, cols) tensor into `out`, which is
 * the whole tensor's buffer of elm_tensor_bytes. first_row is a multiple of 16; num_rows too, if
 * the range does not end the tensor. `weights` points at row first_row, (num_rows, cols) float32.
 * `importance`, NULL or (cols) float32 >= 0, weights the squared errors that E4 and E5 minimise:
 * the mean square of each column's activation. Calls on disjoint ranges may run at the same time;
 * how rows are cut does not change the bytes. */
ELM_API elm_status elm_quantize(elm_format format, const float* weights, const float* importance,
                                uint64_t first_row, uint64_t num_rows, uint64_t rows, uint64_t cols,
                                void* out, elm_error* error);

#ifdef __cplusplus
}
#endif

#endif
