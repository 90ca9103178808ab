/* Filling elm_error, and checked size arithmetic. */
#ifndef ELM_BASE_STATUS_H
#define ELM_BASE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edgellm/edgellm.h"

#if defined(__GNUC__)
#define ELM_PRINTF(format_index, first_argument) \
  __attribute__((format(printf, format_index, first_argument)))
#else
#define ELM_PRINTF(format_index, first_argument)
#endif

/* Writes code and message into `error` (may be NULL) and returns `code`: return elm_fail(...). */
elm_status elm_fail(elm_error* error, elm_status code, const char* format, ...) ELM_PRINTF(3, 4);

/* True if the result fits; *out is written only then. */
static inline bool elm_checked_add(uint64_t a, uint64_t b, uint64_t* out) {
  if (a > UINT64_MAX - b) {
    return false;
  }
  *out = a + b;
  return true;
}

static inline bool elm_checked_mul(uint64_t a, uint64_t b, uint64_t* out) {
  if (a != 0 && b > UINT64_MAX / a) {
    return false;
  }
  *out = a * b;
  return true;
}

#endif
