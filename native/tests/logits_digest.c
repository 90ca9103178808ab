/* Prints a digest of the logits of a token sequence: equal digests mean equal bits. Tests run it
 * for every instruction set, thread count and chunk length, natively and under emulators.
 *
 *   logits_digest MODEL ID,ID,... [isa [threads [chunk [steps [kv]]]]]
 *
 * isa "" is the best one. `steps` tokens are decoded greedily after the prompt and join the digest.
 * kv is an elm_kv_format. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "edgellm/edgellm.h"

static uint64_t fnv1a(uint64_t hash, const void* data, size_t size) {
  const uint8_t* bytes = data;
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ bytes[i]) * UINT64_C(0x100000001B3);
  }
  return hash;
}

static int fail(const elm_error* error) {
  (void)fprintf(stderr, "logits_digest: %s\n", error->message);
  return 1;
}

static size_t parse_ids(const char* text, int32_t* ids, size_t capacity) {
  size_t count = 0;
  while (*text != '\0' && count < capacity) {
    char* end;
    ids[count++] = (int32_t)strtol(text, &end, 10);
    text = *end == ',' ? end + 1 : end;
    if (end == text && *end != '\0') {
      return 0;
    }
  }
  return count;
}

int main(int argc, char** argv) {
  static int32_t ids[65536];
  elm_error error = {0};
  if (argc < 3) {
    (void)fprintf(stderr,
                  "usage: logits_digest MODEL ID,ID,... [isa [threads [chunk [steps [kv]]]]]\n");
    return 2;
  }
  const size_t num_ids = parse_ids(argv[2], ids, sizeof ids / sizeof ids[0]);
  elm_model_options options;
  elm_model_options_default(&options);
  options.isa = argc > 3 && argv[3][0] != '\0' ? argv[3] : NULL;
  options.num_threads = argc > 4 ? atoi(argv[4]) : 1;
  elm_session_options session_options;
  elm_session_options_default(&session_options);
  session_options.chunk_length = argc > 5 ? atoi(argv[5]) : 0;
  session_options.kv_format = argc > 7 ? atoi(argv[7]) : 0;
  const size_t steps = argc > 6 ? (size_t)atoi(argv[6]) : 0;

  elm_model* model;
  elm_session* session;
  elm_model_info info = {.struct_size = sizeof info};
  if (elm_model_open(argv[1], &options, &model, &error) != ELM_STATUS_OK ||
      elm_model_get_info(model, &info, &error) != ELM_STATUS_OK) {
    return fail(&error);
  }
  session_options.context_length = (int32_t)(num_ids + steps + 1);
  if (elm_session_create(model, &session_options, &session, &error) != ELM_STATUS_OK) {
    return fail(&error);
  }
  const size_t vocab = (size_t)info.vocab_size;
  float* logits = malloc(num_ids * vocab * sizeof *logits);
  if (logits == NULL ||
      elm_session_prefill(session, ids, num_ids, logits, num_ids, &error) != ELM_STATUS_OK) {
    return fail(&error);
  }
  uint64_t hash = fnv1a(UINT64_C(0xCBF29CE484222325), logits, num_ids * vocab * sizeof *logits);
  elm_sampling sampling;
  elm_sampling_default(&sampling);
  sampling.temperature = 0.0f;
  for (size_t i = 0; i < steps; ++i) {
    int32_t id;
    size_t count;
    if (elm_session_step(session, &sampling, &id, 1, &count, &error) != ELM_STATUS_OK ||
        elm_session_logits(session, logits, &error) != ELM_STATUS_OK) {
      return fail(&error);
    }
    hash = fnv1a(hash, &id, sizeof id);
    hash = fnv1a(hash, logits, vocab * sizeof *logits);
  }
  (void)printf("%016llx\n", (unsigned long long)hash);
  free(logits);
  elm_session_destroy(session);
  elm_model_close(model);
  return 0;
}
