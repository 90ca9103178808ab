#include <string.h>
#include <time.h>

#include "base/cpu.h"
#include "base/memory.h"
#include "base/threads.h"
#include "base/peak/peak_i8.h"

enum { MAX_THREADS = 256 };

/* Each thread sums its part of a buffer; the best of several rounds is the machine's bandwidth. */
typedef struct probe {
  const uint8_t* data;
  size_t bytes;
  int32_t num_threads;
  uint64_t sums[MAX_THREADS];
} probe;

static void read_part(void* context, int32_t thread) {
  probe* p = context;
  const size_t lines = p->bytes / 64;
  const size_t first = lines * (size_t)thread / (size_t)p->num_threads;
  const size_t last = lines * (size_t)(thread + 1) / (size_t)p->num_threads;
  uint64_t sums[8] = {0};
  for (size_t line = first; line < last; ++line) {
    uint64_t words[8];
    memcpy(words, p->data + line * 64, sizeof words);
    for (int i = 0; i < 8; ++i) {
      sums[i] ^= words[i];
    }
  }
  p->sums[thread] = sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
}

static double seconds(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

elm_status elm_probe_read(uint64_t bytes, int32_t num_threads, double* bytes_per_second,
                          elm_error* error) {
  enum { NUM_ROUNDS = 7 };
  if (bytes_per_second == NULL || bytes < 4096 || num_threads < 1 || num_threads > MAX_THREADS) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "elm_probe_read needs at least 4,096 bytes, 1 to 256 threads and a result");
  }
  const elm_allocator allocator = elm_allocator_default();
  uint8_t* data = allocator.allocate(allocator.context, (size_t)bytes, 64);
  if (data == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for a probe of %llu MiB",
                    (unsigned long long)(bytes >> 20));
  }
  memset(data, 1, (size_t)bytes);
  elm_pool* pool = NULL;
  elm_status status = elm_pool_create(num_threads, &allocator, &pool, error);
  probe p = {.data = data, .bytes = (size_t)bytes, .num_threads = num_threads};
  double best = 0.0;
  for (int round = 0; status == ELM_STATUS_OK && round < NUM_ROUNDS; ++round) {
    const double start = seconds();
    status = elm_pool_run(pool, num_threads, read_part, &p, error);
    const double rate = (double)bytes / (seconds() - start);
    best = rate > best ? rate : best;
  }
  elm_pool_destroy(pool);
  allocator.release(allocator.context, data, (size_t)bytes);
  *bytes_per_second = best;
  return status;
}

/* The best first, as in kernels.inc. */
static elm_peak_i8_fn peak_of(uint32_t isas) {
#if defined(__x86_64__)
  if (isas & 1u << ELM_ISA_AMX) {
    return elm_peak_i8__amx;
  }
  if (isas & 1u << ELM_ISA_AVX512VNNI) {
    return elm_peak_i8__avx512vnni;
  }
  if (isas & 1u << ELM_ISA_AVXVNNI) {
    return elm_peak_i8__avxvnni;
  }
  if (isas & 1u << ELM_ISA_AVX2) {
    return elm_peak_i8__avx2;
  }
#elif defined(__aarch64__)
  if (isas & 1u << ELM_ISA_NEON_I8MM) {
    return elm_peak_i8__neon_i8mm;
  }
  if (isas & 1u << ELM_ISA_NEON_DOTPROD) {
    return elm_peak_i8__neon_dotprod;
  }
  if (isas & 1u << ELM_ISA_NEON) {
    return elm_peak_i8__neon;
  }
#endif
  (void)isas;
  return elm_peak_i8__ref;
}

typedef struct peak {
  elm_peak_i8_fn function;
  size_t num_rounds;
  uint64_t macs[MAX_THREADS];
  int32_t sums[MAX_THREADS];
} peak;

static void multiply_part(void* context, int32_t thread) {
  peak* p = context;
  p->macs[thread] = p->function(p->num_rounds, &p->sums[thread]);
}

elm_status elm_probe_int8(const char* isa_name, int32_t num_threads, double* ops_per_second,
                          elm_error* error) {
  /* A try of some milliseconds is short enough to meet a moment without other processes. */
  enum { NUM_TRIES = 15, NUM_ROUNDS = 1 << 18 };
  elm_isa isa;
  if (isa_name == NULL || ops_per_second == NULL || num_threads < 1 || num_threads > MAX_THREADS ||
      !elm_isa_from_name(isa_name, &isa)) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "elm_probe_int8 needs the name of an instruction set, 1 to 256 threads and a"
                    " result");
  }
  if (!(elm_cpu_isas() & 1u << isa)) {
    return elm_fail(error, ELM_STATUS_UNSUPPORTED, "%s: %s", isa_name, elm_isa_missing(isa));
  }
  const elm_allocator allocator = elm_allocator_default();
  elm_pool* pool = NULL;
  elm_status status = elm_pool_create(num_threads, &allocator, &pool, error);
  peak p = {.function = peak_of(elm_isa_implied(isa)), .num_rounds = NUM_ROUNDS};
  double best = 0.0;
  for (int attempt = 0; status == ELM_STATUS_OK && attempt < NUM_TRIES; ++attempt) {
    const double start = seconds();
    status = elm_pool_run(pool, num_threads, multiply_part, &p, error);
    const double passed = seconds() - start;
    uint64_t macs = 0;
    for (int32_t thread = 0; thread < num_threads; ++thread) {
      macs += p.macs[thread];
    }
    const double rate = 2.0 * (double)macs / passed;
    best = rate > best ? rate : best;
  }
  elm_pool_destroy(pool);
  *ops_per_second = best;
  return status;
}
