/* Token ids in, token ids out: the C API in one page.
 *
 *   cc generate.c -ledgellm -o generate
 *   ./generate model.edge 32 1,4093,198
 *
 * Text needs the tokenizer inside the file, which the Python package brings. */
#include <edgellm/edgellm.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_PROMPT = 4096 };

static int fail(const elm_error* error) {
  fprintf(stderr, "generate: %s\n", error->message);
  return 1;
}

int main(int argc, char** argv) {
  if (argc != 4) {
    fprintf(stderr, "usage: generate MODEL COUNT ID,ID,...\n");
    return 2;
  }
  int32_t prompt[MAX_PROMPT];
  size_t length = 0;
  for (char* text = argv[3]; *text != '\0' && length < MAX_PROMPT;) {
    char* end = text;
    prompt[length++] = (int32_t)strtol(text, &end, 10);
    if (end == text || (*end != ',' && *end != '\0')) {
      fprintf(stderr, "generate: \"%s\" is not a list of ids such as 1,4093,198\n", argv[3]);
      return 2;
    }
    text = *end == ',' ? end + 1 : end;
  }

  elm_error error;
  elm_model* model = NULL;
  elm_session* session = NULL;
  int result = 1;
  if (elm_model_open(argv[1], NULL, &model, &error) != ELM_STATUS_OK) {
    return fail(&error);
  }
  if (elm_session_create(model, NULL, &session, &error) != ELM_STATUS_OK ||
      elm_session_prefill(session, prompt, length, NULL, 0, &error) != ELM_STATUS_OK) {
    result = fail(&error);
    goto done;
  }
  elm_sampling sampling;
  elm_sampling_default(&sampling);
  sampling.temperature = 0.0f; /* greedy */
  for (int i = 0; i < atoi(argv[2]); ++i) {
    int32_t id;
    size_t count;
    if (elm_session_step(session, &sampling, &id, 1, &count, &error) != ELM_STATUS_OK) {
      result = fail(&error);
      goto done;
    }
    printf(i == 0 ? "%d" : ",%d", id);
    fflush(stdout);
  }
  printf("\n");
  result = 0;
done:
  elm_session_destroy(session);
  elm_model_close(model);
  return result;
}
