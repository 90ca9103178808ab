/* Prints what a prompt and the tokens after it cost, in numbers that are the same on every machine,
 * the kernels that were chosen, and the plan. Linked so that everything in the library that takes
 * memory is counted (see CMakeLists.txt).
 *
 *   token_cost MODEL [isa [threads [kv]]]
 *
 * isa "" is the best one, kv an elm_kv_format. The first token after a prompt needs no pass of its
 * own, so the steps are counted from the second on. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "runtime/model.h"

enum { NUM_IDS = 70, NUM_STEPS = 16, CHUNK = 32 };

static atomic_int num_allocations;

#define COUNTED(type, name, parameters, arguments) \
  type __real_##name parameters;                   \
  type __wrap_##name parameters;                   \
  type __wrap_##name parameters {                  \
    (void)atomic_fetch_add(&num_allocations, 1);   \
    return __real_##name arguments;                \
  }

COUNTED(void*, malloc, (size_t size), (size))
COUNTED(void*, calloc, (size_t count, size_t size), (count, size))
COUNTED(void*, realloc, (void* memory, size_t size), (memory, size))
COUNTED(void*, aligned_alloc, (size_t alignment, size_t size), (alignment, size))
COUNTED(int, posix_memalign, (void** out, size_t alignment, size_t size), (out, alignment, size))
COUNTED(void*, mmap, (void* at, size_t size, int protection, int flags, int file, long offset),
        (at, size, protection, flags, file, offset))
COUNTED(FILE*, fopen, (const char* path, const char* mode), (path, mode))

static void expect(elm_status status, const elm_error* error) {
  if (status != ELM_STATUS_OK) {
    (void)fprintf(stderr, "token_cost: %s\n", error->message);
    exit(1);
  }
}

static void print_plan(const elm_model* model) {
  static char text[1 << 20];
  elm_error error;
  size_t length;
  expect(elm_model_plan(model, text, sizeof text, &length, &error), &error);
  (void)printf("%s", text);
}

static void step(elm_session* session, const elm_sampling* sampling) {
  elm_error error;
  int32_t id;
  size_t count;
  expect(elm_session_step(session, sampling, &id, 1, &count, &error), &error);
}

int main(int argc, char** argv) {
  if (argc < 2) {
    (void)fprintf(stderr, "usage: token_cost MODEL [isa [threads [kv]]]\n");
    return 2;
  }
  elm_error error;
  elm_model_options options;
  elm_model_options_default(&options);
  options.isa = argc > 2 && argv[2][0] != '\0' ? argv[2] : NULL;
  options.num_threads = argc > 3 ? atoi(argv[3]) : 1;
  elm_session_options session_options;
  elm_session_options_default(&session_options);
  session_options.context_length = NUM_IDS + NUM_STEPS + 2;
  session_options.chunk_length = CHUNK;
  session_options.kv_format = argc > 4 ? atoi(argv[4]) : 0;

  elm_model* model;
  elm_session* session;
  expect(elm_model_open(argv[1], &options, &model, &error), &error);
  const int opened = atomic_load(&num_allocations);
  expect(elm_session_create(model, &session_options, &session, &error), &error);
  const int created = atomic_load(&num_allocations);

  int32_t ids[NUM_IDS];
  for (int32_t i = 0; i < NUM_IDS; ++i) {
    ids[i] = 7 * i % model->arch->num_tokens;
  }
  elm_sampling sampling; /* everything the sampler can be asked for */
  elm_sampling_default(&sampling);
  sampling.temperature = 1.0f;
  sampling.top_k = 40;
  sampling.top_p = 0.9f;
  sampling.min_p = 0.01f;
  sampling.repetition_penalty = 1.1f;
  elm_session_info before = {.struct_size = sizeof before}, after = before;
  expect(elm_session_prefill(session, ids, NUM_IDS, NULL, 0, &error), &error);
  step(session, &sampling);
  expect(elm_session_get_info(session, &before, &error), &error);
  for (int i = 0; i < NUM_STEPS; ++i) {
    step(session, &sampling);
  }
  expect(elm_session_get_info(session, &after, &error), &error);

  (void)printf("isa %s\n", elm_isa_name(model->kernels.isa));
  (void)printf("session_allocations %d\n", created - opened);
  (void)printf("token_allocations %d\n", atomic_load(&num_allocations) - created);
  (void)printf("prompt_passes %llu\n", (unsigned long long)before.num_passes);
  (void)printf("steps %d\n", NUM_STEPS);
  (void)printf("step_passes %llu\n", (unsigned long long)(after.num_passes - before.num_passes));
  (void)printf("step_barriers %llu\n",
               (unsigned long long)(after.num_barriers - before.num_barriers));
  for (int op = 0; op < ELM_NUM_OPS; ++op) {
    (void)printf("kernel %s\n", model->kernels.names[op]);
  }
  print_plan(model);
  elm_session_destroy(session);
  elm_model_close(model);
  return 0;
}
