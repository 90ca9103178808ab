/* What the C reader thinks of files; the Python tests compare it with the Python reader.
 *
 *   check_file FILE...           a line each: "ok <model id>" or the error
 *   check_file --verify FILE...  the same, weights included
 *   check_file --floats FILE...  a line each: the float32 members of META in hexadecimal
 *   check_file --starve FILE     fails each allocation in turn, and expects the error for that
 *
 * Exit status 1 if any file was refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format/file.h"

typedef struct heap {
  size_t bytes; /* taken and not given back */
  int left;     /* allocations until one fails; below 0: none does */
} heap;

static void* allocate(void* context, size_t size, size_t alignment) {
  heap* own = context;
  if (own->left == 0) {
    return NULL;
  }
  own->left -= own->left > 0 ? 1 : 0;
  own->bytes += size;
  return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void* context, void* memory, size_t size) {
  heap* own = context;
  own->bytes -= size;
  free(memory);
}

static int starve(const char* path) {
  for (int left = 0;; ++left) {
    heap own = {0, left};
    const elm_allocator allocator = {&own, allocate, release};
    elm_file* file;
    elm_error error;
    const elm_status status = elm_file_open(path, false, &allocator, &file, &error);
    elm_file_close(file);
    if (own.bytes != 0) {
      printf("%zu bytes are lost after %d allocations\n", own.bytes, left);
      return 1;
    }
    if (status == ELM_STATUS_OK) {
      printf("ok %d\n", left);
      return 0;
    }
    if (status != ELM_STATUS_OUT_OF_MEMORY) {
      printf("%s\n", error.message);
      return 1;
    }
  }
}

static void print_file(const elm_file* file, bool floats) {
  const elm_arch* arch = elm_file_arch(file);
  if (floats) {
    printf("%a %a %a\n", (double)arch->norm_eps, (double)arch->attention_scale,
           (double)arch->embedding_scale);
    return;
  }
  printf("ok ");
  for (int i = 0; i < 32; ++i) {
    printf("%02x", elm_file_model_id(file)[i]);
  }
  printf("\n");
}

int main(int argc, char** argv) {
  heap own = {0, -1};
  const elm_allocator allocator = {&own, allocate, release};
  const char* mode = argc > 1 && argv[1][0] == '-' ? argv[1] : "";
  int result = 0;
  if (strcmp(mode, "--starve") == 0 && argc == 3) {
    return starve(argv[2]);
  }
  for (int i = mode[0] != 0 ? 2 : 1; i < argc; ++i) {
    elm_file* file;
    elm_error error;
    const bool verify = strcmp(mode, "--verify") == 0;
    if (elm_file_open(argv[i], verify, &allocator, &file, &error) != ELM_STATUS_OK) {
      printf("%s\n", error.message);
      result = 1;
      continue;
    }
    print_file(file, strcmp(mode, "--floats") == 0);
    elm_file_close(file);
  }
  return result;
}
