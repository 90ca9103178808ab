#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

elm_status elm_fail(elm_error* error, elm_status code, const char* format, ...) {
  if (error != NULL) {
    va_list arguments;
    error->code = (int32_t)code;
    va_start(arguments, format);
    (void)vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
  }
  return code;
}

const char* elm_status_name(elm_status status) {
  switch (status) {
    case ELM_STATUS_OK: return "ok";
    case ELM_STATUS_INVALID_ARGUMENT: return "invalid argument";
    case ELM_STATUS_IO: return "input/output";
    case ELM_STATUS_FORMAT: return "format";
    case ELM_STATUS_UNSUPPORTED: return "unsupported";
    case ELM_STATUS_OUT_OF_MEMORY: return "out of memory";
    case ELM_STATUS_CONTEXT_FULL: return "context full";
    case ELM_STATUS_NONFINITE: return "non-finite logits";
    case ELM_STATUS_BUSY: return "busy";
  }
  return "unknown";
}
