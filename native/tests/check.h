/* Checks for C test programs: CHECK counts and prints what failed, check_result ends main. */
#ifndef EDGELLM_TESTS_CHECK_H
#define EDGELLM_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>

static int check_failures = 0;

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) {                                               \
      check_failures += 1;                                            \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                 \
  } while (0)

/* Exit code of main. */
static int check_result(void) {
  if (check_failures != 0) {
    fprintf(stderr, "%d checks failed\n", check_failures);
  }
  return check_failures != 0;
}

/* A small generator for test data: the same numbers everywhere. */
static uint64_t check_random_state = 1;

static inline uint64_t check_random(void) {
  check_random_state = check_random_state * UINT64_C(6364136223846793005) + 1442695040888963407u;
  return check_random_state >> 33;
}

/* In [-1, 1). */
static inline float check_uniform(void) {
  return (float)((int64_t)check_random() - (INT64_C(1) << 30)) * 0x1p-30F;
}

#endif
