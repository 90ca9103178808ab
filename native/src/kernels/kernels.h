/* The kernels: one op, many rows. An op is an argument struct and a function type; a row is an op
 * compiled for one instruction set, named elm_<op>__<isa>, in the file of that name, listed in
 * kernels.inc. The `ref` row of an op defines its result, all others equal it bit for bit.
 *
 * Kernels own no memory, no threads and no state. Buffers are aligned to 64 bytes unless a comment
 * says otherwise and do not overlap. Panel, superblock, group, line: see ARCHITECTURE.md. */
#ifndef ELM_KERNELS_KERNELS_H
#define ELM_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"

enum { ELM_PANEL_ROWS = 16, ELM_SUPERBLOCK = 256, ELM_GROUP = 32, ELM_KV_BLOCK = 32 };
/* Most activation rows of a gemv; a gemm takes any number. */
enum { ELM_GEMV_MAX_ROWS = 8 };
/* Those that the gemv rows of an instruction set take: as many as its registers hold sums for. */
static inline size_t elm_gemv_rows(elm_isa isa) { return isa == ELM_ISA_AVX512VNNI ? 8 : 4; }
/* How far ahead of its reading a gemv asks for weights: past the next page, so that its address is
 * looked up early. 8 KiB beat 2 KiB by 15 % on a virtual Zen 4 with 4 KiB pages. */
enum { ELM_PREFETCH_BYTES = 8192 };

#if defined(ELM_CHECKS)
#include <stdlib.h>
#define ELM_ASSERT(condition) ((condition) ? (void)0 : abort())
#else
#define ELM_ASSERT(condition) ((void)0)
#endif

/* Int8 activations: rows of num_cols numbers (a multiple of 32, zero-padded). */
typedef struct elm_q8 {
  int8_t* q;     /* (rows, stride) */
  float* d;      /* (rows, num_superblocks) scale */
  int16_t* gsum; /* (rows, num_superblocks, 8) sums per group in the order 0 2 1 3 4 6 5 7, which is
                    what 16-bit halves of a line of z meet; zero for groups past the end */
  int32_t* bsum; /* (rows, num_superblocks) sums per superblock */
  size_t stride;
  size_t num_cols;
  size_t num_superblocks;
} elm_q8;

/* out[m, row] = dot(weights[row], x[m]) for the rows of panels [first_panel, last_panel). */
typedef struct elm_matmul_args {
  const uint8_t* weights; /* panel 0 of the tensor */
  size_t panel_bytes;
  size_t first_panel;
  size_t last_panel;
  const elm_q8* x;
  size_t num_rows; /* of x: 1..elm_gemv_rows for gemv */
  float* out;      /* (num_rows, out_stride); column = weight row, whole panels are written */
  size_t out_stride;
} elm_matmul_args;

/* y[i] = (x[i] * scale) * weight[i], scale = 1 / sqrt(mean of squares + eps). May be in place. */
typedef struct elm_rmsnorm_args {
  const float* x;
  const float* weight;
  float* y;
  size_t n;
  float eps;
} elm_rmsnorm_args;

/* Quantises one row of n floats into row `row` of `out`; columns n.. up to num_cols become zero.
 * With `has_hadamard`, for which 32 divides n, what hadamard_f32 makes of them is quantised. */
typedef struct elm_quant_args {
  const float* x;
  size_t n;
  const elm_q8* out;
  size_t row;
  bool has_hadamard;
} elm_quant_args;

/* The Hadamard transform of n floats (32 divides n) in place, superblock by superblock, in blocks
 * of the largest power of two that divides the superblock's width, halved once for every second
 * doubling of the block: an orthonormal transform, but for a factor of sqrt(2) where the block is
 * an odd power of two. What it is for: edgellm/models/_hadamard.py. */
typedef struct elm_hadamard_args {
  float* x;
  size_t n;
} elm_hadamard_args;

/* out[16 p + i] = activation(x[32 p + i]) * x[32 p + 16 + i] for pairs p in [0, num_pairs). */
typedef struct elm_glu_args {
  const float* x;
  float* out;
  size_t num_pairs;
  bool is_gelu; /* tanh-GELU, else SiLU */
} elm_glu_args;

/* Rotates one head in place by (cos, sin), each (n/2), and multiplies by `scale`. */
typedef struct elm_rope_args {
  float* x;
  const float* cos;
  const float* sin;
  size_t n;
  float scale;
} elm_rope_args;

/* Stores one key and one value, n floats each, at slot `slot` of a block of 32 tokens.
 * f16: float16, saturating; k_block is (n, 32 tokens), v_block (32 tokens, n).
 * q8: int8 with a scale per token; the key is turned by elm_hadamard before. k_block is (n/4, 32
 * tokens, 4), v_block (32/4, n, 4 tokens); k_scale and v_scale are (32 tokens). */
typedef struct elm_kv_store_args {
  const float* k;
  const float* v;
  void* k_block;
  void* v_block;
  float* k_scale; /* q8 only */
  float* v_scale; /* q8 only */
  size_t n;
  size_t slot;
} elm_kv_store_args;

enum { ELM_ATTENTION_MAX_QUERIES = 8, ELM_MAX_HEAD_DIM = 512 };

/* A part of a query's result: n floats of out, then max and sum. */
static inline size_t elm_attention_part_floats(size_t n) { return n + 16; }

/* Attention of up to ELM_ATTENTION_MAX_QUERIES queries on one key/value head. Query i attends to
 * positions [begin[i], end[i]); the ranges are not empty. Where `parts` are given, to all queries
 * or to none, they are written for attention_merge_f32 instead of `out`: one for each block, or one
 * for all of them. */
typedef struct elm_attention_args {
  const float* q[ELM_ATTENTION_MAX_QUERIES]; /* (n) rotated and scaled */
  float* out[ELM_ATTENTION_MAX_QUERIES];     /* (n) */
  float* parts[ELM_ATTENTION_MAX_QUERIES];   /* (blocks from that of begin[i] on, a part) or NULL */
  bool is_one_part;
  size_t begin[ELM_ATTENTION_MAX_QUERIES];
  size_t end[ELM_ATTENTION_MAX_QUERIES];
  size_t num_queries;
  const void* k; /* blocks of 32 tokens, one after the other, as kv_store writes them */
  const void* v;
  const float* k_scale; /* (tokens), q8 only */
  const float* v_scale; /* (tokens), q8 only */
  size_t n;             /* head size, a multiple of 16, at most 512 */
} elm_attention_args;

/* Merges the parts of one query in their order: the first of any number of blocks, then blocks. */
typedef struct elm_attention_merge_args {
  const float* parts; /* (num_parts, a part) */
  size_t num_parts;   /* at least 1 */
  float* out;         /* (n) */
  size_t n;
} elm_attention_merge_args;

/* op, args type. The order is that of enum elm_op. */
#define ELM_OPS(OP)                     \
  OP(gemv_q8_e4, elm_matmul_args)       \
  OP(gemv_q8_e5, elm_matmul_args)       \
  OP(gemv_q8_e8, elm_matmul_args)       \
  OP(gemm_q8_e4, elm_matmul_args)       \
  OP(gemm_q8_e5, elm_matmul_args)       \
  OP(gemm_q8_e8, elm_matmul_args)       \
  OP(rmsnorm_f32, elm_rmsnorm_args)     \
  OP(quant_q8, elm_quant_args)          \
  OP(hadamard_f32, elm_hadamard_args)   \
  OP(glu_f32, elm_glu_args)             \
  OP(rope_f32, elm_rope_args)           \
  OP(kv_store_f16, elm_kv_store_args)   \
  OP(attention_f16, elm_attention_args) \
  OP(kv_store_q8, elm_kv_store_args)    \
  OP(attention_q8, elm_attention_args)  \
  OP(attention_merge_f32, elm_attention_merge_args)

typedef enum elm_op {
#define ELM_OP_ENUM(op, args) ELM_OP_##op,
  ELM_OPS(ELM_OP_ENUM)
#undef ELM_OP_ENUM
      ELM_NUM_OPS
} elm_op;

/* elm_<op>_fn for every op. */
#define ELM_OP_TYPE(op, args) typedef void (*elm_##op##_fn)(const args* arguments);
ELM_OPS(ELM_OP_TYPE)
#undef ELM_OP_TYPE

/* The chosen row of every op. */
typedef struct elm_kernels {
#define ELM_OP_MEMBER(op, args) elm_##op##_fn op;
  ELM_OPS(ELM_OP_MEMBER)
#undef ELM_OP_MEMBER
  const char* names[ELM_NUM_OPS];
  elm_isa isa;      /* the best set among the chosen rows */
  size_t gemv_rows; /* elm_gemv_rows of the chosen gemv rows, which are of one set */
} elm_kernels;

/* Chooses the fastest row of each op among the instruction sets of `isas` (bits 1 << elm_isa). */
void elm_kernels_choose(uint32_t isas, elm_kernels* out);

/* The sets of elm_cpu_isas() to choose from when none is asked for: all but those whose products a
 * measurement (a few milliseconds, once in a process) found slower here than the next set's. */
uint32_t elm_kernels_fast_isas(void);

typedef struct elm_kernel_row {
  elm_op op;
  const char* op_name;
  const char* name;
  elm_isa isa;
  void (*function)(void);
} elm_kernel_row;

size_t elm_kernel_rows(const elm_kernel_row** rows);

/* Every row's declaration. */
#define ELM_ROW_gemv_q8_e4 elm_matmul_args
#define ELM_ROW_gemv_q8_e5 elm_matmul_args
#define ELM_ROW_gemv_q8_e8 elm_matmul_args
#define ELM_ROW_gemm_q8_e4 elm_matmul_args
#define ELM_ROW_gemm_q8_e5 elm_matmul_args
#define ELM_ROW_gemm_q8_e8 elm_matmul_args
#define ELM_ROW_rmsnorm_f32 elm_rmsnorm_args
#define ELM_ROW_quant_q8 elm_quant_args
#define ELM_ROW_hadamard_f32 elm_hadamard_args
#define ELM_ROW_glu_f32 elm_glu_args
#define ELM_ROW_rope_f32 elm_rope_args
#define ELM_ROW_kv_store_f16 elm_kv_store_args
#define ELM_ROW_attention_f16 elm_attention_args
#define ELM_ROW_kv_store_q8 elm_kv_store_args
#define ELM_ROW_attention_q8 elm_attention_args
#define ELM_ROW_attention_merge_f32 elm_attention_merge_args
#define ELM_KERNEL(op, isa_name, isa) void elm_##op##__##isa_name(const ELM_ROW_##op* arguments);
#include "kernels/kernels.inc"
#undef ELM_KERNEL

#endif
