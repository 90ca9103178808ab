/* Speed of the matrix rows on one thread: weights read at M = 1 and 4 from memory (GB/s),
 * arithmetic at M = 512 (GOP/s, a multiply and an add are 2), and its share of what the row's own
 * multiply instruction reaches in registers.
 *
 * Usage: kernels_bench [part of a row's name] [rounds]     the best of `rounds` is printed */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/cpu.h"
#include "base/peak/peak_i8.h"
#include "kernels/kernels.h"
#include "kernels/tile.h"

enum { MANY_ROWS = 512, DEFAULT_ROUNDS = 5 };
static const size_t NUM_COLD_BYTES = (size_t)96 << 20; /* more than any cache holds */

typedef struct shape {
  const char* name;
  size_t cols, rows;
} shape;
static const shape shapes[] = {{"SmolLM2-135M gate/up", 576, 3072},
                               {"SmolLM2-135M down", 1536, 576},
                               {"Qwen2.5-0.5B gate/up", 896, 9728},
                               {"Qwen2.5-0.5B down", 4864, 896}};

/* Of this thread, so that other programs on the machine disturb less. */
static double now(void) {
  struct timespec time;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void* allocate(size_t size) {
  void* memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  if (memory == NULL) {
    printf("out of memory\n");
    exit(2);
  }
  return memory;
}

/* ---- peak of an instruction
 * ------------------------------------------------------------------------ */

enum { PEAK_ROUNDS = 2000000, PEAK_CHAINS = 12 };

#if defined(__x86_64__)
#include <immintrin.h>

/* Twelve independent chains; the compiler is kept from seeing through them. */
#define ELM_PEAK(name, flags, vector, step)               \
  static __attribute__((target(flags))) void name(void) { \
    vector sum[PEAK_CHAINS] = {{0}}, a = {0};             \
    __asm__("" : "+v"(a));                                \
    for (int i = 0; i < PEAK_ROUNDS; ++i) {               \
      for (int c = 0; c < PEAK_CHAINS; ++c) {             \
        step;                                             \
        __asm__ volatile("" : "+v"(sum[c]));              \
      }                                                   \
    }                                                     \
  }
ELM_PEAK(run_vpdpbusd, "avx512f,avx512vnni", __m512i, sum[c] = _mm512_dpbusd_epi32(sum[c], a, a))
ELM_PEAK(run_vpdpbusd_ymm, "avxvnni", __m256i, sum[c] = _mm256_dpbusd_avx_epi32(sum[c], a, a))
ELM_PEAK(run_vpmaddubsw, "avx2", __m256i, sum[c] = _mm256_maddubs_epi16(sum[c], a))

static void run_tdpbssd(void) {
  int32_t sum;
  (void)elm_peak_i8__amx(PEAK_ROUNDS * PEAK_CHAINS / 4, &sum); /* a round is four */
}

typedef struct peak {
  elm_isa isa;
  const char* instruction;
  double operations;
  void (*run)(void);
} peak;
static const peak peaks[] = {{ELM_ISA_AMX, "tdpbssd", 32768, run_tdpbssd},
                             {ELM_ISA_AVX512VNNI, "vpdpbusd zmm", 128, run_vpdpbusd},
                             {ELM_ISA_AVXVNNI, "vpdpbusd ymm", 64, run_vpdpbusd_ymm},
                             {ELM_ISA_AVX2, "vpmaddubsw ymm", 64, run_vpmaddubsw}};
#else
typedef struct peak {
  elm_isa isa;
  const char* instruction;
  double operations;
  void (*run)(void);
} peak;
static const peak peaks[] = {{ELM_NUM_ISAS, "", 0, NULL}};
#endif

/* GOP/s of the instruction that rows of `isa` multiply with; 0 if it is not known. */
static double measure_peak(elm_isa isa, int rounds, bool is_printed) {
  for (size_t i = 0; i < sizeof peaks / sizeof peaks[0]; ++i) {
    if (peaks[i].isa == isa) {
      const double total = peaks[i].operations * (double)(PEAK_ROUNDS * PEAK_CHAINS);
      double best = 0.0;
      for (int round = 0; round < rounds; ++round) {
        const double start = now();
        peaks[i].run();
        const double rate = total / (now() - start) / 1e9;
        best = rate > best ? rate : best;
      }
      if (is_printed) {
        printf("peak of %s: %.0f GOP/s\n", peaks[i].instruction, best);
      }
      return best;
    }
  }
  return 0.0;
}

/* ---- matrix rows
 * ------------------------------------------------------------------------------------ */

/* Activations whose content does not matter to speed. */
static elm_q8 new_activations(size_t num_rows, size_t num_cols) {
  elm_q8 x;
  x.num_cols = num_cols;
  x.stride = (num_cols + 63) / 64 * 64;
  x.num_superblocks = (num_cols + ELM_SUPERBLOCK - 1) / ELM_SUPERBLOCK;
  const size_t num_blocks = num_rows * x.num_superblocks;
  x.q = allocate(num_rows * x.stride);
  x.d = allocate(num_blocks * sizeof(float));
  x.gsum = allocate(num_blocks * 8 * sizeof(int16_t));
  x.bsum = allocate(num_blocks * sizeof(int32_t));
  memset(x.q, 17, num_rows * x.stride);
  memset(x.gsum, 1, num_blocks * 8 * sizeof(int16_t));
  memset(x.bsum, 1, num_blocks * sizeof(int32_t));
  for (size_t i = 0; i < num_blocks; ++i) {
    x.d[i] = 1.0f;
  }
  return x;
}
static void free_activations(elm_q8 x) {
  free(x.q);
  free(x.d);
  free(x.gsum);
  free(x.bsum);
}

static elm_format format_of(elm_op op) {
  switch (op) {
    case ELM_OP_gemv_q8_e4:
    case ELM_OP_gemm_q8_e4: return ELM_FORMAT_E4;
    case ELM_OP_gemv_q8_e5:
    case ELM_OP_gemm_q8_e5: return ELM_FORMAT_E5;
    default: return ELM_FORMAT_E8;
  }
}

/* Seconds of one product, the best of `rounds`, each over at least `num_copies` copies of the
 * weights one after the other. */
static double measure(const elm_kernel_row* row, const shape* s, size_t num_rows, size_t num_copies,
                      uint8_t* weights, int rounds) {
  elm_q8 x = new_activations(num_rows, s->cols);
  elm_matmul_args args = {.panel_bytes = elm_panel_bytes(format_of(row->op), s->cols),
                          .last_panel = s->rows / ELM_PANEL_ROWS,
                          .x = &x,
                          .num_rows = num_rows,
                          .out = allocate(num_rows * s->rows * sizeof(float)),
                          .out_stride = s->rows};
  double best = 1e9;
  for (int round = 0; round < rounds; ++round) {
    const double start = now();
    for (size_t copy = 0; copy < num_copies; ++copy) {
      args.weights = weights + copy * args.panel_bytes * args.last_panel;
      ((elm_gemm_q8_e4_fn)row->function)(&args);
    }
    const double seconds = (now() - start) / (double)num_copies;
    best = seconds < best ? seconds : best;
  }
  free(args.out);
  free_activations(x);
  return best;
}

static void bench_row(const elm_kernel_row* row, uint8_t* weights, int rounds) {
  const bool is_gemv = row->op <= ELM_OP_gemv_q8_e8; /* gemv come first */
  for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; ++i) {
    const shape* s = &shapes[i];
    const size_t bytes = s->rows / ELM_PANEL_ROWS * elm_panel_bytes(format_of(row->op), s->cols);
    printf("%-34s K %4zu N %4zu  %-22s", row->name, s->cols, s->rows, s->name);
    if (is_gemv) {
      const size_t num_copies = NUM_COLD_BYTES / bytes;
      const double one = measure(row, s, 1, num_copies, weights, rounds);
      const double four = measure(row, s, 4, num_copies, weights, rounds);
      printf("M 1 %6.2f GB/s   M 4 %6.2f GB/s\n", (double)bytes / one / 1e9,
             (double)bytes / four / 1e9);
    } else {
      const double operations = 2.0 * (double)(s->rows * s->cols);
      const double eight = measure(row, s, 8, 4, weights, rounds);
      const double many = measure(row, s, MANY_ROWS, 1, weights, rounds);
      const double rate = operations * (double)MANY_ROWS / many / 1e9;
      const double top = measure_peak(row->isa, rounds, false);
      printf("M 8 %6.1f   M %d %6.1f GOP/s", operations * 8 / eight / 1e9, MANY_ROWS, rate);
      if (top > 0.0) {
        printf("  %3.0f %% of peak", 100 * rate / top);
      }
      printf("\n");
    }
    (void)fflush(stdout);
  }
}

int main(int argc, char** argv) {
  const char* part = argc > 1 ? argv[1] : "_q8_e";
  const int rounds = argc > 2 ? atoi(argv[2]) : DEFAULT_ROUNDS;
  (void)elm_fpu_enter();
  const uint32_t isas = elm_cpu_isas();
  for (elm_isa isa = 0; isa < ELM_NUM_ISAS; ++isa) {
    if (isas >> isa & 1) {
      (void)measure_peak(isa, rounds, true);
    }
  }
  uint8_t* weights = allocate(NUM_COLD_BYTES);
  memset(weights, 0x35, NUM_COLD_BYTES);
  const elm_kernel_row* rows;
  const size_t num_rows = elm_kernel_rows(&rows);
  for (size_t i = 0; i < num_rows; ++i) {
    const bool is_matrix = rows[i].op <= ELM_OP_gemm_q8_e8;
    if (is_matrix && strstr(rows[i].name, part) != NULL && (isas >> rows[i].isa & 1)) {
      bench_row(&rows[i], weights, rounds);
    }
  }
  free(weights);
  return 0;
}
