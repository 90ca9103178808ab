/* check_file [--verify] FILE...: for each file a line "ok <model id>" or the reader's error.
 * Exit status 1 if any was refused. The Python tests compare this with the Python reader. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/file.h"

static void* allocate(void* context, size_t size, size_t alignment) {
  (void)context;
  return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void* context, void* memory, size_t size) {
  (void)context;
  (void)size;
  free(memory);
}

int main(int argc, char** argv) {
  const elm_allocator allocator = {NULL, allocate, release};
  const bool verify = argc > 1 && strcmp(argv[1], "--verify") == 0;
  int result = 0;
  for (int i = verify ? 2 : 1; i < argc; ++i) {
    elm_file* file;
    elm_error error;
    if (elm_file_open(argv[i], verify, &allocator, &file, &error) != ELM_STATUS_OK) {
      printf("%s\n", error.message);
      result = 1;
      continue;
    }
    printf("ok ");
    for (int byte = 0; byte < 32; ++byte) {
      printf("%02x", elm_file_model_id(file)[byte]);
    }
    printf("\n");
    elm_file_close(file);
  }
  return result;
}
