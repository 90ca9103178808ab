/* Every kernel row equals the definition of its op, bit for bit, whatever the tile, the range of
 * panels or the number of rows; writes nothing else; and reads nothing it should not see.
 *
 * Usage: kernels_test [quick]     quick: fewer shapes, for emulators */
#include "kernels/kernels.h"

#include <math.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "edgellm/edgellm.h"
#include "kernels/simd.h"
#include "kernels/tile.h"

enum { MAX_FAILURES = 20, CANARY = 0xA5, GUARD_BYTES = 64 };

static bool is_quick;
static int num_failures;
static const char* current_row = "";
static bool is_op_checked[ELM_NUM_OPS];

static void begin_row(const elm_kernel_row* row) {
  current_row = row->name;
  is_op_checked[row->op] = true;
}

static void fail(const char* format, ...) {
  if (++num_failures > MAX_FAILURES) {
    return;
  }
  va_list arguments;
  va_start(arguments, format);
  printf("FAIL %s: ", current_row);
  vprintf(format, arguments);
  printf("\n");
  va_end(arguments);
}

/* ---- data ---------------------------------------------------------------------------------------
 */

static uint64_t random_state = 0x9E3779B97F4A7C15u;

static uint32_t random_u32(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 32);
}
static int random_in(int first, int last) {
  return first + (int)(random_u32() % (uint32_t)(last - first + 1));
}
static float random_float(float limit) {
  return ((float)(random_u32() >> 8) * 0x1p-23f - 1.0f) * limit;
}
/* Zero, denormals, the ends of the range, infinities and NaN, or an ordinary number. */
static float random_odd(void) {
  static const float odd[] = {0.0f,      -0.0f,  0x1p-149f, -0x1p-149f, 0x1p-127f,
                              0x1p-126f, 3e-39f, 1e-37f,    1e-20f,     3.4e38f,
                              -3.4e38f,  1e30f,  INFINITY,  -INFINITY,  NAN};
  const size_t count = sizeof odd / sizeof odd[0];
  const size_t pick = random_u32() % (2 * count);
  return pick < count ? odd[pick] : random_float(4.0f);
}

/* Memory between two canaries; check_guards says whether both are whole. */
typedef struct guarded {
  uint8_t* base;
  size_t size;
} guarded;

static guarded guarded_new(size_t size) {
  const size_t whole = (size + 2 * GUARD_BYTES + 63) / 64 * 64;
  guarded memory = {aligned_alloc(64, whole), size};
  if (memory.base == NULL) {
    printf("out of memory\n");
    exit(2);
  }
  memset(memory.base, CANARY, whole);
  return memory;
}
static void* guarded_data(guarded memory) { return memory.base + GUARD_BYTES; }
static void guarded_free(guarded memory, const char* what) {
  for (size_t i = 0; i < GUARD_BYTES; ++i) {
    if (memory.base[i] != CANARY || memory.base[GUARD_BYTES + memory.size + i] != CANARY) {
      fail("%s: wrote outside of its output", what);
      break;
    }
  }
  free(memory.base);
}

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
/* The same bits, or both NaN: which NaN is not defined. */
static bool is_same(float a, float b) { return bits_of(a) == bits_of(b) || (isnan(a) && isnan(b)); }

static void check_floats(const float* got, const float* expected, size_t count, const char* what,
                         size_t n) {
  for (size_t i = 0; i < count; ++i) {
    if (!is_same(got[i], expected[i])) {
      fail("%s of n = %zu, element %zu: %a instead of %a", what, n, i, (double)got[i],
           (double)expected[i]);
      return;
    }
  }
}

/* ---- matrix products ------------------------------------------------------------------------ */

enum {
  NUM_PANELS = 3,
  NUM_WEIGHT_ROWS = NUM_PANELS * ELM_PANEL_ROWS,
  FEW_ROWS = 40,
  MAX_ROWS = 131
};
/* ODD_SCALES: zero, denormal, huge, infinite and NaN scales. */
typedef enum pattern { ORDINARY, AT_THE_LIMITS, ODD_SCALES, NUM_PATTERNS } pattern;

/* A matrix in a tile format, activations, and their product by the definition. */
typedef struct problem {
  elm_format format;
  size_t num_cols;
  size_t panel_bytes;
  guarded weights;
  guarded q, d, gsum, bsum;
  elm_q8 x;
  float expected[MAX_ROWS][NUM_WEIGHT_ROWS];
} problem;

/* A group's scale and zero within -128 <= s*q - z <= 127. */
static void pick_group(elm_format format, pattern kind, int* s, int* z) {
  static const int e4_limits[5][2] = {{15, 98}, {15, 128}, {1, 0}, {1, 128}, {8, 0}};
  static const int e5_limits[5][2] = {{8, 121}, {8, 128}, {1, 0}, {1, 128}, {4, 0}};
  const bool is_e4 = format == ELM_FORMAT_E4;
  if (kind == AT_THE_LIMITS) {
    const int* limits = (is_e4 ? e4_limits : e5_limits)[random_in(0, 4)];
    *s = limits[0];
    *z = limits[1];
  } else {
    *s = random_in(1, is_e4 ? 15 : 8);
    const int highest = *s * (is_e4 ? 15 : 31);
    *z = random_in(highest > 127 ? highest - 127 : 0, 128);
  }
}

/* Fills row `r` of an E4 or E5 tile and the integer weights w (cols) it stands for. */
static void encode_grouped_row(elm_format format, pattern kind, uint8_t* tile, size_t cols,
                               size_t r, int8_t* w) {
  const int last = format == ELM_FORMAT_E4 ? 15 : 31;
  const size_t group_lines = format == ELM_FORMAT_E4 ? 4 : 5;
  uint8_t* scales = tile + cols / ELM_GROUP * group_lines * ELM_LINE;
  uint32_t word = 0;
  for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
    int s, z;
    pick_group(format, kind, &s, &z);
    word |= (uint32_t)s << (4 * g);
    scales[ELM_LINE * (1 + g / 4) + 4 * r + g % 4] = (uint8_t)z;
    const int whole_group = random_in(0, 2); /* at the limits: all 0, all `last` or mixed */
    for (size_t k = 0; k < ELM_GROUP; ++k) {
      int code = random_in(0, last);
      if (kind == AT_THE_LIMITS) {
        code = whole_group == 2 ? last * random_in(0, 1) : last * whole_group;
      }
      uint8_t* at = tile + g * group_lines * ELM_LINE + 4 * r + k % 4;
      at[k / 8 * ELM_LINE] |= (uint8_t)(k % 8 < 4 ? code & 15 : (code & 15) << 4);
      if (format == ELM_FORMAT_E5) {
        at[4 * ELM_LINE] |= (uint8_t)((code >> 4) << (k % 8 < 4 ? k / 8 : 4 + k / 8));
      }
      w[g * ELM_GROUP + k] = (int8_t)(s * code - z);
    }
  }
  memcpy(scales + 4 * r, &word, sizeof word);
}

static void encode_e8_row(pattern kind, uint8_t* tile, size_t cols, size_t r, int8_t* w) {
  const int whole_row = random_in(-1, 1);
  for (size_t k = 0; k < cols; ++k) {
    int code = random_in(-127, 127);
    if (kind == AT_THE_LIMITS) {
      code = whole_row == 0 ? 127 - 254 * random_in(0, 1) : 127 * whole_row;
    }
    tile[k / 4 * ELM_LINE + 4 * r + k % 4] = (uint8_t)code;
    w[k] = (int8_t)code;
  }
}

static float pick_scale(pattern kind) {
  return kind == ODD_SCALES ? random_odd() : 0x1p-9f + fabsf(random_float(0.02f));
}

static void fill_activations(problem* p, pattern kind) {
  const elm_q8* x = &p->x;
  static const uint8_t order[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  for (size_t m = 0; m < MAX_ROWS; ++m) {
    for (size_t s = 0; s < x->num_superblocks; ++s) {
      const size_t cols = elm_superblock_cols(x->num_cols, s), block = m * x->num_superblocks + s;
      int8_t* q = x->q + m * x->stride + s * ELM_SUPERBLOCK;
      int32_t sums[8] = {0}, total = 0;
      const int sign = random_in(-1, 1);
      for (size_t k = 0; k < cols; ++k) {
        int value = random_in(-127, 127);
        if (kind == AT_THE_LIMITS) {
          value = sign == 0 ? 127 - 254 * random_in(0, 1) : 127 * sign;
        }
        q[k] = (int8_t)(m % 8 == 5 ? 0 : value); /* every eighth row is zero */
        sums[k / ELM_GROUP] += q[k];
        total += q[k];
      }
      for (size_t i = 0; i < 8; ++i) {
        x->gsum[block * 8 + i] = (int16_t)sums[order[i]];
      }
      x->bsum[block] = total;
      x->d[block] = m % 8 == 5 ? 0.0f : pick_scale(kind);
    }
  }
}

static problem* problem_new(elm_format format, size_t num_cols, pattern kind) {
  problem* p = malloc(sizeof *p);
  const size_t num_superblocks = (num_cols + ELM_SUPERBLOCK - 1) / ELM_SUPERBLOCK;
  p->format = format;
  p->num_cols = num_cols;
  p->panel_bytes = elm_panel_bytes(format, num_cols);
  p->weights = guarded_new(NUM_PANELS * p->panel_bytes);
  p->x.num_cols = num_cols;
  p->x.num_superblocks = num_superblocks;
  p->x.stride = num_cols + 32;
  p->q = guarded_new(MAX_ROWS * p->x.stride);
  p->d = guarded_new(MAX_ROWS * num_superblocks * sizeof(float));
  p->gsum = guarded_new(MAX_ROWS * num_superblocks * 8 * sizeof(int16_t));
  p->bsum = guarded_new(MAX_ROWS * num_superblocks * sizeof(int32_t));
  p->x.q = guarded_data(p->q);
  p->x.d = guarded_data(p->d);
  p->x.gsum = guarded_data(p->gsum);
  p->x.bsum = guarded_data(p->bsum);
  fill_activations(p, kind);

  memset(guarded_data(p->weights), 0, p->weights.size);
  memset(p->expected, 0, sizeof p->expected);
  for (size_t row = 0; row < NUM_WEIGHT_ROWS; ++row) {
    uint8_t* tile = (uint8_t*)guarded_data(p->weights) + row / ELM_PANEL_ROWS * p->panel_bytes;
    const size_t r = row % ELM_PANEL_ROWS;
    for (size_t s = 0; s < num_superblocks; ++s) {
      const size_t cols = elm_superblock_cols(num_cols, s);
      const float d = pick_scale(kind);
      int8_t w[ELM_SUPERBLOCK];
      if (format == ELM_FORMAT_E8) {
        encode_e8_row(kind, tile, cols, r, w);
      } else {
        encode_grouped_row(format, kind, tile, cols, r, w);
      }
      tile += elm_tile_bytes(format, cols);
      memcpy(tile - ELM_LINE + 4 * r, &d, sizeof d);
      for (size_t m = 0; m < MAX_ROWS; ++m) {
        const int8_t* q = p->x.q + m * p->x.stride + s * ELM_SUPERBLOCK;
        int32_t sum = 0;
        for (size_t k = 0; k < cols; ++k) {
          sum += w[k] * q[k];
        }
        float* acc = &p->expected[m][row];
        *acc = fmaf((float)sum, d * p->x.d[m * num_superblocks + s], *acc);
      }
    }
  }
  return p;
}

static void problem_free(problem* p) {
  guarded_free(p->weights, "weights");
  guarded_free(p->q, "q");
  guarded_free(p->d, "d");
  guarded_free(p->gsum, "gsum");
  guarded_free(p->bsum, "bsum");
  free(p);
}

/* Runs a row on panels [first, last) and num_rows rows: those outputs are right, no other changed.
 */
static void check_product(elm_gemm_q8_e4_fn function, const problem* p, size_t num_rows,
                          size_t first, size_t last) {
  enum { STRIDE = NUM_WEIGHT_ROWS + 16 };
  const guarded memory = guarded_new(num_rows * STRIDE * sizeof(float));
  float* out = guarded_data(memory);
  float canary;
  memcpy(&canary, out, sizeof canary);
  const elm_matmul_args args = {.weights = guarded_data(p->weights),
                                .panel_bytes = p->panel_bytes,
                                .first_panel = first,
                                .last_panel = last,
                                .x = &p->x,
                                .num_rows = num_rows,
                                .out = out,
                                .out_stride = STRIDE};
  function(&args);
  for (size_t m = 0; m < num_rows; ++m) {
    for (size_t row = 0; row < STRIDE; ++row) {
      const bool is_output = row >= first * ELM_PANEL_ROWS && row < last * ELM_PANEL_ROWS;
      const float expected = is_output ? p->expected[m][row] : canary;
      if (!is_same(out[m * STRIDE + row], expected)) {
        fail("K = %zu, M = %zu, panels %zu..%zu, row %zu, activation %zu: %a instead of %a",
             p->num_cols, num_rows, first, last, row, m, (double)out[m * STRIDE + row],
             (double)expected);
        m = num_rows - 1;
        break;
      }
    }
  }
  guarded_free(memory, "out");
}

static bool is_gemv(elm_op op) {
  return op == ELM_OP_gemv_q8_e4 || op == ELM_OP_gemv_q8_e5 || op == ELM_OP_gemv_q8_e8;
}

static bool is_product_of(elm_op op, elm_format format) {
  switch (format) {
    case ELM_FORMAT_E4: return op == ELM_OP_gemv_q8_e4 || op == ELM_OP_gemm_q8_e4;
    case ELM_FORMAT_E5: return op == ELM_OP_gemv_q8_e5 || op == ELM_OP_gemm_q8_e5;
    case ELM_FORMAT_E8: return op == ELM_OP_gemv_q8_e8 || op == ELM_OP_gemm_q8_e8;
    case ELM_FORMAT_F32: break;
  }
  return false;
}

static void check_row_on_problem(const elm_kernel_row* row, const problem* p) {
  const elm_gemm_q8_e4_fn function = (elm_gemm_q8_e4_fn)row->function;
  const size_t most = is_gemv(row->op) ? elm_gemv_rows(row->isa) : MAX_ROWS;
  const bool is_slow = is_quick || p->num_cols > 600 || row->isa == ELM_ISA_REF;
  for (size_t num_rows = 1; num_rows <= most; ++num_rows) {
    if (num_rows <= (is_slow ? 13 : FEW_ROWS) || num_rows == MAX_ROWS) {
      check_product(function, p, num_rows, 0, NUM_PANELS);
    }
  }
  check_product(function, p, most, 1, 2);
  check_product(function, p, 1, 0, 2);
  check_product(function, p, 2, 2, 3);
  check_product(function, p, 3, 1, 1);
}

static void check_products_of(elm_format format, const elm_kernel_row* rows, size_t num_rows,
                              uint32_t isas) {
  static const size_t all_cols[] = {32, 64, 96, 256, 288, 576, 896, 1536, 4864};
  static const size_t quick_cols[] = {32, 96, 256, 288, 576};
  const size_t* cols = is_quick ? quick_cols : all_cols;
  const size_t num_cols = is_quick ? 5 : 9;
  for (size_t c = 0; c < num_cols; ++c) {
    for (pattern kind = 0; kind < NUM_PATTERNS; ++kind) {
      problem* p = problem_new(format, cols[c], kind);
      for (size_t i = 0; i < num_rows; ++i) {
        if (is_product_of(rows[i].op, format) && (isas >> rows[i].isa & 1)) {
          begin_row(&rows[i]);
          check_row_on_problem(&rows[i], p);
        }
      }
      problem_free(p);
    }
  }
}

static void check_products(const elm_kernel_row* rows, size_t num_rows, uint32_t isas) {
  check_products_of(ELM_FORMAT_E4, rows, num_rows, isas);
  check_products_of(ELM_FORMAT_E5, rows, num_rows, isas);
  check_products_of(ELM_FORMAT_E8, rows, num_rows, isas);
}

/* Rows for instructions that few machines have, as
 * tests/emulated compiles them for AVX-512 VNNI. */
#if defined(__x86_64__)
#define EMULATED_ROWS(ROW) \
  ROW(gemm_q8_e4, amx)     \
  ROW(gemm_q8_e5, amx)     \
  ROW(gemm_q8_e8, amx)     \
  ROW(gemv_q8_e4, avxvnni) \
  ROW(gemv_q8_e5, avxvnni) \
  ROW(gemv_q8_e8, avxvnni) \
  ROW(gemm_q8_e4, avxvnni) \
  ROW(gemm_q8_e5, avxvnni) \
  ROW(gemm_q8_e8, avxvnni)
#define DECLARE_ROW(op, isa) void emulated_##op##__##isa(const elm_matmul_args* args);
EMULATED_ROWS(DECLARE_ROW)
#define LIST_ROW(op, isa)                                           \
  {ELM_OP_##op, #op, "emulated_" #op "__" #isa, ELM_ISA_AVX512VNNI, \
   (void (*)(void))emulated_##op##__##isa},
static const elm_kernel_row emulated_rows[] = {EMULATED_ROWS(LIST_ROW)};

static void check_emulated(const elm_kernel_row* rows, size_t num_rows, uint32_t isas) {
  const size_t num_emulated = sizeof emulated_rows / sizeof emulated_rows[0];
  size_t num_expected = 0;
  for (size_t i = 0; i < num_rows; ++i) {
    num_expected += rows[i].isa == ELM_ISA_AMX || rows[i].isa == ELM_ISA_AVXVNNI;
  }
  if (num_emulated != num_expected) {
    fail("%zu rows for AMX and AVX-VNNI, %zu of them emulated", num_expected, num_emulated);
  }
  check_products(emulated_rows, num_emulated, isas);
}
#else
static void check_emulated(const elm_kernel_row* rows, size_t num_rows, uint32_t isas) {
  (void)rows, (void)num_rows, (void)isas;
}
#endif

/* ---- elementwise ops ------------------------------------------------------------------------ */

/* n floats between canaries: random, all small, all large, or odd. */
static guarded random_floats(size_t n, size_t kind) {
  const guarded memory = guarded_new(n * sizeof(float));
  float* x = guarded_data(memory);
  static const float limits[] = {1.0f, 1e-39f, 1e18f, 90.0f};
  for (size_t i = 0; i < n; ++i) {
    x[i] = kind < 4 ? random_float(limits[kind]) : random_odd();
  }
  return memory;
}
enum { NUM_KINDS = 5 };

/* The definition in ARCHITECTURE.md, word for word. */
static void define_rmsnorm(const elm_rmsnorm_args* args) {
  float lanes[16] = {0};
  for (size_t i = 0; i < args->n; ++i) {
    lanes[i % 16] = fmaf(args->x[i], args->x[i], lanes[i % 16]);
  }
  for (size_t width = 8; width >= 1; width /= 2) {
    for (size_t i = 0; i < width; ++i) {
      lanes[i] += lanes[i + width];
    }
  }
  const float scale = 1.0f / sqrtf(lanes[0] / (float)args->n + args->eps);
  for (size_t i = 0; i < args->n; ++i) {
    args->y[i] = (args->x[i] * scale) * args->weight[i];
  }
}

static void check_rmsnorm(elm_rmsnorm_f32_fn function, size_t n, size_t kind) {
  const guarded x = random_floats(n, kind), weight = random_floats(n, 0);
  const guarded y = guarded_new(n * sizeof(float)), expected = guarded_new(n * sizeof(float));
  elm_rmsnorm_args args = {guarded_data(x), guarded_data(weight), guarded_data(expected), n, 1e-6f};
  define_rmsnorm(&args);
  args.y = guarded_data(y);
  function(&args);
  check_floats(guarded_data(y), guarded_data(expected), n, "norm", n);
  args.y = guarded_data(x); /* in place */
  function(&args);
  check_floats(guarded_data(x), guarded_data(expected), n, "norm in place", n);
  guarded_free(x, "x");
  guarded_free(weight, "weight");
  guarded_free(y, "y");
  guarded_free(expected, "expected");
}

typedef struct quantized {
  guarded q, d, gsum, bsum;
  elm_q8 out;
} quantized;

static quantized quantized_new(size_t n) {
  quantized z;
  z.out.num_cols = (n + ELM_GROUP - 1) / ELM_GROUP * ELM_GROUP;
  z.out.stride = z.out.num_cols;
  z.out.num_superblocks = (n + ELM_SUPERBLOCK - 1) / ELM_SUPERBLOCK;
  z.q = guarded_new(2 * z.out.stride);
  z.d = guarded_new(2 * z.out.num_superblocks * sizeof(float));
  z.gsum = guarded_new(2 * z.out.num_superblocks * 8 * sizeof(int16_t));
  z.bsum = guarded_new(2 * z.out.num_superblocks * sizeof(int32_t));
  z.out.q = guarded_data(z.q);
  z.out.d = guarded_data(z.d);
  z.out.gsum = guarded_data(z.gsum);
  z.out.bsum = guarded_data(z.bsum);
  return z;
}
static void quantized_free(quantized z) {
  guarded_free(z.q, "q");
  guarded_free(z.d, "d");
  guarded_free(z.gsum, "gsum");
  guarded_free(z.bsum, "bsum");
}

/* What a quantised row promises, apart from how it is made. */
static void check_quantized_meaning(const float* x, size_t n, const elm_q8* out) {
  static const uint8_t order[8] = {0, 2, 1, 3, 4, 6, 5, 7};
  for (size_t s = 0; s < out->num_superblocks; ++s) {
    const float d = out->d[out->num_superblocks + s];
    int32_t sums[8] = {0}, total = 0;
    for (size_t k = 0; k < elm_superblock_cols(out->num_cols, s); ++k) {
      const size_t i = s * ELM_SUPERBLOCK + k;
      const int q = out->q[out->stride + i];
      const double error = (i < n ? (double)x[i] : 0.0) - (double)d * q;
      if (isfinite(d) &&
          (q < -127 || (i >= n && q != 0) || fabs(error) > 0.5001 * (double)d + 0x1p-96)) {
        fail("quantised n = %zu, element %zu: %a became %d * %a", n, i, i < n ? (double)x[i] : 0.0,
             q, (double)d);
        return;
      }
      sums[k / ELM_GROUP] += q;
      total += q;
    }
    const int16_t* gsum = out->gsum + (out->num_superblocks + s) * 8;
    for (size_t i = 0; i < 8; ++i) {
      if (gsum[i] != sums[order[i]]) {
        fail("n = %zu, superblock %zu: group sum %zu is %d instead of %d", n, s, i, gsum[i],
             (int)sums[order[i]]);
      }
    }
    if (out->bsum[out->num_superblocks + s] != total) {
      fail("n = %zu, superblock %zu: sum is wrong", n, s);
    }
  }
}

static void check_quant(elm_quant_q8_fn function, size_t n, size_t kind, bool has_hadamard) {
  const guarded x = random_floats(n, kind);
  if (kind == 0) { /* halves, which round to even */
    float* halves = guarded_data(x);
    for (size_t i = 0; i < n; ++i) {
      halves[i] = (float)random_in(-127, 126) + 0.5f;
    }
    halves[0] = -127.0f;
  }
  const quantized got = quantized_new(n), expected = quantized_new(n);
  elm_quant_args args = {guarded_data(x), n, &expected.out, 1, has_hadamard};
  elm_quant_q8__ref(&args);
  args.out = &got.out;
  function(&args);
  const size_t num_superblocks = got.out.num_superblocks;
  for (size_t s = 0; s < num_superblocks; ++s) {
    const float d = expected.out.d[num_superblocks + s];
    if (!is_same(got.out.d[num_superblocks + s], d)) {
      fail("n = %zu, superblock %zu: scale %a instead of %a", n, s,
           (double)got.out.d[num_superblocks + s], (double)d);
    }
    const size_t offset = got.out.stride + s * ELM_SUPERBLOCK;
    /* a scale that is not finite already spoils every product: q does not matter */
    if (isfinite(d) && memcmp(got.out.q + offset, expected.out.q + offset,
                              elm_superblock_cols(got.out.num_cols, s)) != 0) {
      fail("n = %zu, superblock %zu: other integers than ref", n, s);
    }
  }
  if (has_hadamard) { /* what is quantised is what the transform alone gives */
    const elm_hadamard_args transform = {guarded_data(x), n};
    elm_hadamard_f32__ref(&transform);
  }
  check_quantized_meaning(guarded_data(x), n, &got.out);
  guarded_free(x, "x");
  quantized_free(got);
  quantized_free(expected);
}

/* Equal to ref; and ref is the sum that defines it, element by element. */
static void check_hadamard(elm_hadamard_f32_fn function, size_t n, size_t kind) {
  const guarded x = random_floats(n, kind), expected = guarded_new(n * sizeof(float));
  float *out = guarded_data(x), *right = guarded_data(expected);
  double* plain = malloc(n * sizeof *plain);
  for (size_t i = 0; i < n; ++i) {
    right[i] = out[i];
    plain[i] = (double)out[i];
  }
  elm_hadamard_f32__ref(&(elm_hadamard_args){right, n});
  function(&(elm_hadamard_args){out, n});
  check_floats(out, right, n, "hadamard", n);
  for (size_t i = 0; kind == 0 && i < n; ++i) {
    const size_t superblock = i / ELM_SUPERBLOCK * ELM_SUPERBLOCK;
    const size_t width = n - superblock < ELM_SUPERBLOCK ? n - superblock : ELM_SUPERBLOCK;
    const size_t block = width & (~width + 1);
    const size_t first = superblock + (i - superblock) / block * block;
    const int halvings = __builtin_ctzll(block) / 2;
    double sum = 0, size = 0;
    for (size_t j = 0; j < block; ++j) {
      const bool is_odd = __builtin_popcountll(j & (i - first)) % 2 != 0;
      sum += is_odd ? -plain[first + j] : plain[first + j];
      size += fabs(plain[first + j]);
    }
    if (fabs(sum / (1 << halvings) - (double)out[i]) > 1e-6 * size) {
      fail("n = %zu: number %zu of the Hadamard transform is %g instead of %g", n, i,
           (double)out[i], sum / (1 << halvings));
    }
  }
  free(plain);
  guarded_free(x, "x");
  guarded_free(expected, "expected");
}

static void check_glu(elm_glu_f32_fn function, size_t num_pairs, size_t kind, bool is_gelu) {
  const size_t n = 16 * num_pairs;
  const guarded x = random_floats(2 * n, kind);
  const guarded out = guarded_new(n * sizeof(float)), expected = guarded_new(n * sizeof(float));
  elm_glu_args args = {guarded_data(x), guarded_data(expected), num_pairs, is_gelu};
  elm_glu_f32__ref(&args);
  args.out = guarded_data(out);
  function(&args);
  check_floats(guarded_data(out), guarded_data(expected), n, is_gelu ? "gelu" : "silu", n);
  guarded_free(x, "x");
  guarded_free(out, "out");
  guarded_free(expected, "expected");
}

/* The definition in ARCHITECTURE.md, and the scale after it. */
static void define_rope(const elm_rope_args* args) {
  const size_t half = args->n / 2;
  for (size_t i = 0; i < half; ++i) {
    const float x0 = args->x[i], x1 = args->x[half + i];
    args->x[i] = fmaf(x0, args->cos[i], -(x1 * args->sin[i])) * args->scale;
    args->x[half + i] = fmaf(x1, args->cos[i], x0 * args->sin[i]) * args->scale;
  }
}

static void check_rope(elm_rope_f32_fn function, size_t n, size_t kind) {
  const guarded x = random_floats(n, kind), cosine = random_floats(n / 2, 0);
  const guarded sine = random_floats(n / 2, 0), expected = guarded_new(n * sizeof(float));
  memcpy(guarded_data(expected), guarded_data(x), n * sizeof(float));
  elm_rope_args args = {guarded_data(expected), guarded_data(cosine), guarded_data(sine), n,
                        0.125f};
  define_rope(&args);
  args.x = guarded_data(x);
  function(&args);
  check_floats(guarded_data(x), guarded_data(expected), n, "rotation", n);
  guarded_free(x, "x");
  guarded_free(cosine, "cos");
  guarded_free(sine, "sin");
  guarded_free(expected, "expected");
}

/* Keys and values of some tokens, as kv_store writes them. */
typedef struct cache {
  bool is_q8;
  size_t n;
  guarded k, v, k_scale, v_scale;
} cache;

/* Filled with what must never be seen: NaN, and -128 that no kernel writes. */
static cache cache_new(bool is_q8, size_t n, size_t num_tokens) {
  const size_t bytes = n * num_tokens * (is_q8 ? sizeof(int8_t) : sizeof(uint16_t));
  const cache c = {is_q8,
                   n,
                   guarded_new(bytes),
                   guarded_new(bytes),
                   guarded_new(num_tokens * sizeof(float)),
                   guarded_new(num_tokens * sizeof(float))};
  memset(guarded_data(c.k), is_q8 ? 0x80 : 0xFF, bytes);
  memset(guarded_data(c.v), is_q8 ? 0x80 : 0xFF, bytes);
  memset(guarded_data(c.k_scale), 0xFF, num_tokens * sizeof(float));
  memset(guarded_data(c.v_scale), 0xFF, num_tokens * sizeof(float));
  return c;
}
static void cache_free(cache c) {
  guarded_free(c.k, "keys");
  guarded_free(c.v, "values");
  guarded_free(c.k_scale, "scales of keys");
  guarded_free(c.v_scale, "scales of values");
}

static void cache_store(cache c, elm_kv_store_f16_fn function, size_t token, const float* k,
                        const float* v) {
  const size_t block = token / ELM_KV_BLOCK * ELM_KV_BLOCK;
  const size_t offset = block * c.n * (c.is_q8 ? sizeof(int8_t) : sizeof(uint16_t));
  const elm_kv_store_args args = {.k = k,
                                  .v = v,
                                  .k_block = (uint8_t*)guarded_data(c.k) + offset,
                                  .v_block = (uint8_t*)guarded_data(c.v) + offset,
                                  .k_scale = (float*)guarded_data(c.k_scale) + block,
                                  .v_scale = (float*)guarded_data(c.v_scale) + block,
                                  .n = c.n,
                                  .slot = token % ELM_KV_BLOCK};
  function(&args);
}

static elm_kv_store_f16_fn ref_store(bool is_q8) {
  return is_q8 ? elm_kv_store_q8__ref : elm_kv_store_f16__ref;
}

/* Whether scales and codes are equal; a scale that is not finite spoils the codes in any case. */
static bool is_same_half(bool is_q8, size_t slot, guarded codes_a, guarded scales_a,
                         guarded codes_b, guarded scales_b) {
  const float* a = guarded_data(scales_a);
  const float* b = guarded_data(scales_b);
  for (size_t i = 0; i < ELM_KV_BLOCK; ++i) {
    if (!is_same(a[i], b[i])) {
      return false;
    }
  }
  return (is_q8 && !isfinite(a[slot])) ||
         memcmp(guarded_data(codes_a), guarded_data(codes_b), codes_a.size) == 0;
}

/* Key and value of a slot lie where they should, saturated. */
static void check_stored_halves(const cache* c, size_t slot, const float* k, const float* v) {
  const uint16_t* keys = guarded_data(c->k);
  const uint16_t* values = guarded_data(c->v);
  for (size_t i = 0; i < c->n; ++i) {
    const float got[2] = {v_half_to_float(keys[i * ELM_KV_BLOCK + slot]),
                          v_half_to_float(values[slot * c->n + i])};
    const float wanted[2] = {k[i], v[i]};
    for (size_t j = 0; j < 2; ++j) {
      const float x = fmaxf(-65504.0f, fminf(65504.0f, wanted[j]));
      const float half_step = fmaxf(fabsf(x) * 0x1p-11f, 0x1p-25f);
      if (isnan(wanted[j]) ? !isnan(got[j]) : !(fabsf(got[j] - x) <= half_step)) {
        fail("n = %zu, slot %zu: %a was stored as %a", c->n, slot, (double)wanted[j],
             (double)got[j]);
        return;
      }
    }
  }
}

static void check_kv_store(elm_kv_store_f16_fn function, bool is_q8, size_t n, size_t kind,
                           size_t slot) {
  const guarded k = random_floats(n, kind), v = random_floats(n, kind);
  const cache expected = cache_new(is_q8, n, ELM_KV_BLOCK), got = cache_new(is_q8, n, ELM_KV_BLOCK);
  cache_store(expected, ref_store(is_q8), slot, guarded_data(k), guarded_data(v));
  cache_store(got, function, slot, guarded_data(k), guarded_data(v));
  if (!is_same_half(is_q8, slot, got.k, got.k_scale, expected.k, expected.k_scale) ||
      !is_same_half(is_q8, slot, got.v, got.v_scale, expected.v, expected.v_scale)) {
    fail("n = %zu, slot %zu, kind %zu: other numbers than ref", n, slot, kind);
  }
  if (!is_q8) {
    check_stored_halves(&got, slot, guarded_data(k), guarded_data(v));
  }
  guarded_free(k, "k");
  guarded_free(v, "v");
  cache_free(expected);
  cache_free(got);
}

/* ---- attention ----------------------------------------------------------------------------- */

enum { NUM_TOKENS = 5 * ELM_KV_BLOCK, MAX_QUERIES = ELM_ATTENTION_MAX_QUERIES, MAX_N = 256 };

typedef struct attention_problem {
  size_t n;
  guarded q;
  cache cache;
  elm_attention_args args; /* without outputs */
  float k[NUM_TOKENS][MAX_N];
  float v[NUM_TOKENS][MAX_N];
  float expected[MAX_QUERIES][MAX_N];
} attention_problem;

static const size_t ranges[][2] = {{0, 1},   {0, 32},  {0, 33},   {7, 70},    {31, 33}, {40, 41},
                                   {0, 160}, {63, 64}, {64, 128}, {100, 159}, {5, 9},   {33, 97},
                                   {0, 131}, {0, 132}, {0, 133},  {0, 134}};
enum { NUM_RANGES = sizeof ranges / sizeof ranges[0] };

static float define_exp(float x) {
  float lanes[16];
  v_store(lanes, v_exp(v_set(x)));
  return lanes[0];
}

/* The definition of attention over float16 in ARCHITECTURE.md, for query a. */
static void define_attention(const attention_problem* p, size_t a, float* out) {
  const size_t begin = p->args.begin[a], end = p->args.end[a];
  float out_max = 0.0f, out_sum = 0.0f;
  for (size_t base = begin / ELM_KV_BLOCK * ELM_KV_BLOCK; base < end; base += ELM_KV_BLOCK) {
    const size_t from = begin > base ? begin : base;
    const size_t to = end < base + ELM_KV_BLOCK ? end : base + ELM_KV_BLOCK;
    float s[NUM_TOKENS], o[MAX_N] = {0}, lanes[16] = {0}, max = -INFINITY;
    for (size_t j = from; j < to; ++j) {
      s[j] = 0.0f;
      for (size_t i = 0; i < p->n; ++i) {
        s[j] = fmaf(p->args.q[a][i], p->k[j][i], s[j]);
      }
      max = fmaxf(max, s[j]);
    }
    for (size_t j = from; j < to; ++j) {
      const float probability = define_exp(s[j] - max);
      lanes[(j - base) % 16] += probability;
      for (size_t i = 0; i < p->n; ++i) {
        o[i] = fmaf(probability, p->v[j][i], o[i]);
      }
    }
    for (size_t width = 8; width >= 1; width /= 2) {
      for (size_t i = 0; i < width; ++i) {
        lanes[i] += lanes[i + width];
      }
    }
    const bool is_first = from == begin;
    const float top = is_first ? max : fmaxf(out_max, max);
    const float old_factor = define_exp(out_max - top), new_factor = define_exp(max - top);
    out_sum = is_first ? lanes[0] : fmaf(out_sum, old_factor, lanes[0] * new_factor);
    for (size_t i = 0; i < p->n; ++i) {
      out[i] = is_first ? o[i] : fmaf(out[i], old_factor, o[i] * new_factor);
    }
    out_max = top;
  }
  for (size_t i = 0; i < p->n; ++i) {
    out[i] *= 1.0f / out_sum;
  }
}

/* Tokens outside of every query's range are not stored: they must not be seen. */
static attention_problem* attention_new(bool is_q8, size_t n, size_t first_range,
                                        size_t num_queries, float scale) {
  attention_problem* p = malloc(sizeof *p);
  p->n = n;
  p->q = guarded_new(MAX_QUERIES * n * sizeof(float));
  p->cache = cache_new(is_q8, n, NUM_TOKENS);
  p->args = (elm_attention_args){.num_queries = num_queries,
                                 .k = guarded_data(p->cache.k),
                                 .v = guarded_data(p->cache.v),
                                 .k_scale = guarded_data(p->cache.k_scale),
                                 .v_scale = guarded_data(p->cache.v_scale),
                                 .n = n};
  size_t low = NUM_TOKENS, high = 0;
  for (size_t a = 0; a < num_queries; ++a) {
    const size_t* range = ranges[(first_range + a) % NUM_RANGES];
    float* q = (float*)guarded_data(p->q) + a * n;
    p->args.q[a] = q;
    p->args.out[a] = p->expected[a];
    p->args.begin[a] = range[0];
    p->args.end[a] = range[1];
    low = range[0] < low ? range[0] : low;
    high = range[1] > high ? range[1] : high;
    for (size_t i = 0; i < n; ++i) {
      q[i] = random_float(scale);
    }
  }
  for (size_t j = low; j < high; ++j) {
    for (size_t i = 0; i < n; ++i) { /* what float16 holds exactly */
      p->k[j][i] = v_half_to_float(v_float_to_half(random_float(1.0f)));
      p->v[j][i] = v_half_to_float(v_float_to_half(random_float(1.0f)));
    }
    cache_store(p->cache, ref_store(is_q8), j, p->k[j], p->v[j]);
  }
  if (is_q8) {
    elm_attention_q8__ref(&p->args);
  }
  for (size_t a = 0; !is_q8 && a < num_queries; ++a) {
    define_attention(p, a, p->expected[a]);
  }
  return p;
}

static void attention_free(attention_problem* p) {
  guarded_free(p->q, "q");
  cache_free(p->cache);
  free(p);
}

/* ref is softmax(q k) v, computed here in double, to within a few roundings of its cache. */
static void check_attention_meaning(const attention_problem* p) {
  const double limit = p->cache.is_q8 ? 0.12 : 2e-5;
  for (size_t a = 0; a < p->args.num_queries; ++a) {
    double scores[NUM_TOKENS], sum = 0.0, max = -INFINITY;
    for (size_t j = p->args.begin[a]; j < p->args.end[a]; ++j) {
      scores[j] = 0.0;
      for (size_t i = 0; i < p->n; ++i) {
        scores[j] += (double)p->args.q[a][i] * (double)p->k[j][i];
      }
      max = scores[j] > max ? scores[j] : max;
    }
    for (size_t j = p->args.begin[a]; j < p->args.end[a]; ++j) {
      scores[j] = exp(scores[j] - max);
      sum += scores[j];
    }
    for (size_t i = 0; i < p->n; ++i) {
      double out = 0.0;
      for (size_t j = p->args.begin[a]; j < p->args.end[a]; ++j) {
        out += scores[j] / sum * (double)p->v[j][i];
      }
      if (!(fabs(out - (double)p->expected[a][i]) < limit)) {
        fail("ref, n = %zu, query %zu, element %zu: %g instead of %g", p->n, a, i,
             (double)p->expected[a][i], out);
        return;
      }
    }
  }
}

static void check_attention(elm_attention_f16_fn function, const attention_problem* p) {
  elm_attention_args args = p->args;
  guarded outs[MAX_QUERIES];
  for (size_t a = 0; a < args.num_queries; ++a) {
    outs[a] = guarded_new(p->n * sizeof(float));
    args.out[a] = guarded_data(outs[a]);
  }
  function(&args);
  for (size_t a = 0; a < args.num_queries; ++a) {
    check_floats(args.out[a], p->expected[a], p->n, "attention", p->n);
    guarded_free(outs[a], "out");
  }
}

/* Parts of all queries in one call, and of each in calls of two blocks, the first of which is one
 * part; merged they are the result. */
static void check_attention_parts(elm_attention_f16_fn function, elm_attention_merge_f32_fn merge,
                                  const attention_problem* p) {
  enum { SPAN = 2 * ELM_KV_BLOCK, MAX_PARTS = NUM_TOKENS / ELM_KV_BLOCK };
  const size_t part = elm_attention_part_floats(p->n);
  const guarded out = guarded_new(p->n * sizeof(float));
  guarded whole[MAX_QUERIES];
  size_t num_parts[MAX_QUERIES];
  elm_attention_args args = p->args;
  for (size_t a = 0; a < args.num_queries; ++a) {
    const size_t first = args.begin[a] / ELM_KV_BLOCK;
    num_parts[a] = (args.end[a] + ELM_KV_BLOCK - 1) / ELM_KV_BLOCK - first;
    whole[a] = guarded_new(num_parts[a] * part * sizeof(float));
    args.parts[a] = guarded_data(whole[a]);
    args.out[a] = NULL;
  }
  function(&args);
  for (size_t a = 0; a < args.num_queries; ++a) {
    const guarded pieces = guarded_new(num_parts[a] * part * sizeof(float));
    elm_attention_args one = args;
    one.num_queries = 1;
    one.q[0] = args.q[a];
    const size_t first = args.begin[a] / ELM_KV_BLOCK;
    size_t num_pieces = 0;
    for (size_t base = first * ELM_KV_BLOCK; base < args.end[a]; base += SPAN) {
      one.begin[0] = base > args.begin[a] ? base : args.begin[a];
      one.end[0] = base + SPAN < args.end[a] ? base + SPAN : args.end[a];
      one.parts[0] = (float*)guarded_data(pieces) + num_pieces * part;
      one.is_one_part = num_pieces == 0;
      function(&one);
      num_pieces += one.is_one_part ? 1 : (one.end[0] - base + ELM_KV_BLOCK - 1) / ELM_KV_BLOCK;
    }
    merge(
        &(elm_attention_merge_args){guarded_data(whole[a]), num_parts[a], guarded_data(out), p->n});
    check_floats(guarded_data(out), p->expected[a], p->n, "parts", p->n);
    merge(&(elm_attention_merge_args){guarded_data(pieces), num_pieces, guarded_data(out), p->n});
    check_floats(guarded_data(out), p->expected[a], p->n, "pieces", p->n);
    guarded_free(pieces, "pieces");
    guarded_free(whole[a], "parts");
  }
  guarded_free(out, "out");
}

/* More parts than go through one exp, against the definition in plain loops. */
static void check_merge(elm_attention_merge_f32_fn merge, size_t num_parts, size_t n) {
  const size_t part = elm_attention_part_floats(n);
  const guarded parts = guarded_new(num_parts * part * sizeof(float));
  const guarded out = guarded_new(n * sizeof(float));
  float* from = guarded_data(parts);
  float expected[MAX_N], max = 0.0f, sum = 0.0f;
  for (size_t b = 0; b < num_parts; ++b, from += part) {
    for (size_t i = 0; i < n; ++i) {
      from[i] = random_float(1.0f);
    }
    from[n] = random_float(b % 5 == 0 ? 40.0f : 2.0f);
    from[n + 1] = 1.5f + random_float(1.0f);
    const float top = b == 0 || from[n] > max ? from[n] : max;
    const float old_factor = define_exp(max - top), new_factor = define_exp(from[n] - top);
    sum = b == 0 ? from[n + 1] : fmaf(sum, old_factor, from[n + 1] * new_factor);
    for (size_t i = 0; i < n; ++i) {
      expected[i] = b == 0 ? from[i] : fmaf(expected[i], old_factor, from[i] * new_factor);
    }
    max = top;
  }
  for (size_t i = 0; i < n; ++i) {
    expected[i] *= 1.0f / sum;
  }
  merge(&(elm_attention_merge_args){guarded_data(parts), num_parts, guarded_data(out), n});
  check_floats(guarded_data(out), expected, n, "merge", num_parts);
  guarded_free(out, "out");
  guarded_free(parts, "parts");
}

static void check_merges(const elm_kernel_row* rows, size_t num_rows, uint32_t isas) {
  for (size_t i = 0; i < num_rows; ++i) {
    if (rows[i].op == ELM_OP_attention_merge_f32 && (isas >> rows[i].isa & 1)) {
      begin_row(&rows[i]);
      for (size_t num_parts = 1; num_parts < 70; ++num_parts) {
        check_merge((elm_attention_merge_f32_fn)rows[i].function, num_parts,
                    16 + num_parts % 4 * 80);
      }
    }
  }
}

/* A NaN in a key or a value reaches the queries that attend to it, and no other. */
static void check_attention_nonfinite(elm_attention_f16_fn function, bool is_q8) {
  for (size_t b = 0; b < 2; ++b) {
    attention_problem* p = attention_new(is_q8, 64, 6, 3, 1.0f); /* 0..160, 63..64, 64..128 */
    (b == 0 ? p->k : p->v)[69][5] = NAN;
    cache_store(p->cache, ref_store(is_q8), 69, p->k[69], p->v[69]);
    function(&p->args);
    if (isfinite(p->expected[0][5]) || isfinite(p->expected[2][5])) {
      fail("NaN in a %s was lost", b == 0 ? "key" : "value");
    }
    if (!isfinite(p->expected[1][5])) {
      fail("NaN in a %s reached a query that does not see it", b == 0 ? "key" : "value");
    }
    attention_free(p);
  }
}

static void check_attentions(bool is_q8, const elm_kernel_row* rows, size_t num_rows,
                             uint32_t isas) {
  static const size_t sizes[] = {16, 32, 48, 64, 80, 96, 128, 256};
  const elm_op op = is_q8 ? ELM_OP_attention_q8 : ELM_OP_attention_f16;
  const elm_attention_merge_f32_fn merge = elm_attention_merge_f32__ref;
  for (size_t i = 0; i < num_rows; ++i) {
    if (rows[i].op == op && (isas >> rows[i].isa & 1)) {
      begin_row(&rows[i]);
      check_attention_nonfinite((elm_attention_f16_fn)rows[i].function, is_q8);
    }
  }
  for (size_t c = 0; c < sizeof sizes / sizeof sizes[0]; ++c) {
    for (size_t first = 0; first < NUM_RANGES; ++first) {
      for (size_t num_queries = 1; num_queries <= MAX_QUERIES; ++num_queries) {
        if ((first + num_queries + c) % (is_quick ? 4 : 2) != 0) {
          continue;
        }
        /* every third: scores so large that most probabilities are zero */
        const bool is_sharp = (first + num_queries) % 3 == 0;
        const float scale = is_sharp ? 40.0f : 1.0f;
        attention_problem* p = attention_new(is_q8, sizes[c], first, num_queries, scale);
        current_row = is_q8 ? "elm_attention_q8__ref" : "elm_attention_f16__ref";
        if (!is_sharp) {
          check_attention_meaning(p);
        }
        for (size_t i = 0; i < num_rows; ++i) {
          if (rows[i].op == op && (isas >> rows[i].isa & 1)) {
            begin_row(&rows[i]);
            check_attention((elm_attention_f16_fn)rows[i].function, p);
            check_attention_parts((elm_attention_f16_fn)rows[i].function, merge, p);
          }
        }
        attention_free(p);
      }
    }
  }
}

/* ---- the elementwise rows ------------------------------------------------------------------- */

/* Ops that go over a vector of any length. */
static void check_vector_op(const elm_kernel_row* row, size_t n, size_t kind) {
  switch (row->op) {
    case ELM_OP_rmsnorm_f32:
      begin_row(row);
      check_rmsnorm((elm_rmsnorm_f32_fn)row->function, n, kind);
      break;
    case ELM_OP_quant_q8:
      begin_row(row);
      check_quant((elm_quant_q8_fn)row->function, n, kind, false);
      if (n % ELM_GROUP == 0) {
        check_quant((elm_quant_q8_fn)row->function, n, kind, true);
      }
      break;
    case ELM_OP_hadamard_f32:
      begin_row(row);
      if (n % ELM_GROUP == 0) {
        check_hadamard((elm_hadamard_f32_fn)row->function, n, kind);
      }
      break;
    case ELM_OP_glu_f32:
      begin_row(row);
      check_glu((elm_glu_f32_fn)row->function, (n + 31) / 32, kind, false);
      check_glu((elm_glu_f32_fn)row->function, (n + 31) / 32, kind, true);
      break;
    default: break;
  }
}

/* Ops that go over a head. */
static void check_head_op(const elm_kernel_row* row, size_t n, size_t kind) {
  const size_t slot = (n / 16 + 7 * kind) % ELM_KV_BLOCK;
  switch (row->op) {
    case ELM_OP_rope_f32:
      begin_row(row);
      check_rope((elm_rope_f32_fn)row->function, n, kind);
      break;
    case ELM_OP_kv_store_f16:
      begin_row(row);
      check_kv_store((elm_kv_store_f16_fn)row->function, false, n, kind, slot);
      break;
    case ELM_OP_kv_store_q8:
      begin_row(row);
      check_kv_store((elm_kv_store_q8_fn)row->function, true, n, kind, slot);
      break;
    default: break;
  }
}

static void check_elementwise(const elm_kernel_row* row) {
  static const size_t sizes[] = {1, 7, 16, 17, 31, 32, 64, 100, 255, 256, 257, 576, 896, 1152};
  static const size_t heads[] = {16, 32, 48, 64, 80, 96, 128, 256};
  for (size_t kind = 0; kind < NUM_KINDS; ++kind) {
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; ++i) {
      check_vector_op(row, sizes[i], kind);
    }
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; ++i) {
      check_head_op(row, heads[i], kind);
    }
  }
}

/* ---- accuracy of the definitions, against double -------------------------------------------- */

static double ulps(float got, double expected) {
  int exponent;
  (void)frexp(expected, &exponent);
  return fabs((double)got - expected) / ldexp(1.0, exponent - 24);
}

static void check_accuracy(void) {
  double exp_error = 0.0, sigmoid_error = 0.0, silu_error = 0.0, gelu_error = 0.0;
  const int steps = is_quick ? 2000 : 40000;
  for (int step = 0; step < steps; ++step) {
    float x[32], got[16];
    for (int i = 0; i < 16; ++i) {
      x[i] = random_float(87.0f);
      x[i + 16] = 1.0f;
    }
    v_store(got, v_exp(v_load(x)));
    for (int i = 0; i < 16; ++i) {
      exp_error = fmax(exp_error, ulps(got[i], exp((double)x[i])));
    }
    v_store(got, v_sigmoid(v_load(x)));
    for (int i = 0; i < 16; ++i) {
      sigmoid_error = fmax(sigmoid_error, ulps(got[i], 1.0 / (1.0 + exp(-(double)x[i]))));
    }
    const elm_glu_args silu = {x, got, 1, false}, gelu = {x, got, 1, true};
    elm_glu_f32__ref(&silu);
    for (int i = 0; i < 16; ++i) {
      silu_error = fmax(silu_error, ulps(got[i], (double)x[i] / (1.0 + exp(-(double)x[i]))));
    }
    for (int i = 0; i < 16; ++i) {
      x[i] /= 10.0f;
    }
    elm_glu_f32__ref(&gelu);
    for (int i = 0; i < 16; ++i) {
      const double g = (double)x[i];
      const double u = 0.7978845608028654 * (g + 0.044715 * g * g * g);
      gelu_error = fmax(gelu_error, fabs((double)got[i] - 0.5 * g * (1.0 + tanh(u))));
    }
  }
  current_row = "accuracy";
  printf("accuracy: exp %.2f ulp, sigmoid %.2f ulp, silu %.2f ulp, gelu %.1e absolute on |x| < 9\n",
         exp_error, sigmoid_error, silu_error, gelu_error);
  if (exp_error > 1.5 || sigmoid_error > 3.0 || silu_error > 3.5 || gelu_error > 1e-6) {
    fail("beyond 1.5, 3 and 3.5 ulp and 1e-6");
  }
  float got[16];
  v_store(got, v_exp(v_set(0.0f)));
  if (got[0] != 1.0f) {
    fail("exp(0) is %a", (double)got[0]);
  }
  v_store(got, v_exp(v_set(-INFINITY)));
  if (got[0] != 0.0f) {
    fail("exp(-inf) is %a", (double)got[0]);
  }
}

static void check_rmsnorm_accuracy(void) {
  double error = 0.0;
  for (int round = 0; round < 200; ++round) {
    float x[576], y[576], weight[576];
    double sum = 0.0;
    const float limit = ldexpf(1.0f, random_in(-20, 20));
    for (size_t i = 0; i < 576; ++i) {
      x[i] = random_float(limit);
      weight[i] = 1.0f;
      sum += (double)x[i] * (double)x[i];
    }
    const elm_rmsnorm_args args = {x, weight, y, 576, 1e-5f};
    elm_rmsnorm_f32__ref(&args);
    for (size_t i = 0; i < 576; ++i) {
      error = fmax(error, ulps(y[i], (double)x[i] / sqrt(sum / 576 + (double)1e-5f)));
    }
  }
  printf("accuracy: rmsnorm %.2f ulp\n", error);
  if (error > 4.0) {
    fail("rmsnorm is beyond 4 ulp");
  }
}

/* ---- choice --------------------------------------------------------------------------------- */

/* A set that is asked for is used; those used unasked are of the CPU's and stay the same. */
static void check_choice(uint32_t isas) {
  current_row = "choice";
  for (elm_isa isa = 0; isa < ELM_NUM_ISAS; ++isa) {
    if (isas >> isa & 1) {
      elm_kernels kernels;
      elm_kernels_choose(isas & elm_isa_implied(isa), &kernels);
      if (kernels.isa != isa) {
        fail("%s instead of %s, which was asked for", elm_isa_name(kernels.isa), elm_isa_name(isa));
      }
    }
  }
  const uint32_t fast = elm_kernels_fast_isas();
  if ((fast & ~isas) != 0 || (fast & 1) == 0 || fast != elm_kernels_fast_isas()) {
    fail("fast sets %x of %x", fast, isas);
  }
}

/* ---- all ------------------------------------------------------------------------------------ */

int main(int argc, char** argv) {
  is_quick = argc > 1 && strcmp(argv[1], "quick") == 0;
  (void)elm_fpu_enter();
  const elm_kernel_row* rows;
  const size_t num_rows = elm_kernel_rows(&rows);
  const uint32_t isas = elm_cpu_isas();
  for (size_t i = 0; i < num_rows; ++i) {
    if (isas >> rows[i].isa & 1) {
      check_elementwise(&rows[i]);
    } else {
      printf("skipped %s: %s\n", rows[i].name, elm_isa_missing(rows[i].isa));
    }
  }
  check_products(rows, num_rows, isas);
  check_emulated(rows, num_rows, isas);
  check_attentions(false, rows, num_rows, isas);
  check_attentions(true, rows, num_rows, isas);
  check_merges(rows, num_rows, isas);
  check_choice(isas);
  check_accuracy();
  check_rmsnorm_accuracy();
  for (size_t i = 0; i < num_rows; ++i) {
    if (!is_op_checked[rows[i].op]) {
      current_row = rows[i].name;
      fail("this test does not know the op");
    }
  }
  printf("%zu rows, %d failures\n", num_rows, num_failures);
  return num_failures != 0;
}
