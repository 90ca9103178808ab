#include "kernels/kernels.h"

#if defined(__aarch64__)

#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "kernels/tile.h"

/* smmla does twice the work of sdot, but some cores start it half as often or less. Products of the
 * size of a small chunk with a panel, the two sets in turns, the best of each: E4 only, in which
 * nearly all weights are. */
enum { NUM_ROWS = 32, NUM_COLS = 512, NUM_PRODUCTS = 16, NUM_TRIES = 5 };

static double seconds(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static double measure(elm_gemm_q8_e4_fn gemm, const elm_matmul_args* args) {
  const double start = seconds();
  for (int i = 0; i < NUM_PRODUCTS; ++i) {
    gemm(args);
  }
  return seconds() - start;
}

static bool is_i8mm_fast(void) {
  enum { NUM_SUPERBLOCKS = NUM_COLS / ELM_SUPERBLOCK, LINES = ELM_SUPERBLOCK / 8 + 4 };
  _Alignas(64) uint8_t weights[NUM_SUPERBLOCKS * LINES * ELM_LINE];
  _Alignas(64) int8_t q[NUM_ROWS * NUM_COLS];
  _Alignas(64) float d[NUM_ROWS * NUM_SUPERBLOCKS];
  _Alignas(64) float out[NUM_ROWS * ELM_PANEL_ROWS];
  memset(weights, 0x35, sizeof weights);
  memset(q, 17, sizeof q);
  for (size_t i = 0; i < sizeof d / sizeof d[0]; ++i) {
    d[i] = 1.0f;
  }
  const elm_q8 x = {
      .q = q, .d = d, .stride = NUM_COLS, .num_cols = NUM_COLS, .num_superblocks = NUM_SUPERBLOCKS};
  const elm_matmul_args args = {.weights = weights,
                                .panel_bytes = sizeof weights,
                                .last_panel = 1,
                                .x = &x,
                                .num_rows = NUM_ROWS,
                                .out = out,
                                .out_stride = ELM_PANEL_ROWS};
  double dotprod = 1e9, i8mm = 1e9;
  for (int attempt = 0; attempt < NUM_TRIES; ++attempt) {
    const double a = measure(elm_gemm_q8_e4__neon_dotprod, &args);
    const double b = measure(elm_gemm_q8_e4__neon_i8mm, &args);
    dotprod = a < dotprod ? a : dotprod;
    i8mm = b < i8mm ? b : i8mm;
  }
  return i8mm < dotprod;
}

uint32_t elm_kernels_fast_isas(void) {
  /* Kept for the process, so that its models and elm_kernel_get agree; 0 is not measured yet. */
  static atomic_uint kept;
  const uint32_t i8mm = UINT32_C(1) << ELM_ISA_NEON_I8MM;
  const uint32_t all = elm_cpu_isas();
  unsigned fast = atomic_load(&kept);
  if (fast == 0) {
    const unsigned measured = all & i8mm && !is_i8mm_fast() ? all & ~i8mm : all;
    fast = atomic_compare_exchange_strong(&kept, &fast, measured) ? measured : fast;
  }
  return fast;
}

#else

uint32_t elm_kernels_fast_isas(void) { return elm_cpu_isas(); }

#endif
