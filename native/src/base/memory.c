#include "base/memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Blocks of at least this size are mapped. */
static const size_t map_threshold = 1 << 20;

/* Nothing in the library asks for more than a page's alignment. */
static void* default_allocate(void* context, size_t size, size_t alignment) {
  (void)context;
  if (alignment > 4096) {
    return NULL;
  }
  if (size >= map_threshold) {
    void* memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
  }
  void* memory = NULL;
  if (posix_memalign(&memory, alignment < sizeof(void*) ? sizeof(void*) : alignment, size) != 0) {
    return NULL;
  }
  memset(memory, 0, size);
  return memory;
}

static void default_release(void* context, void* memory, size_t size) {
  (void)context;
  if (size >= map_threshold) {
    (void)munmap(memory, size);
  } else {
    free(memory);
  }
}

elm_allocator elm_allocator_default(void) {
  return (elm_allocator){NULL, default_allocate, default_release};
}

void* elm_arena_take(elm_arena* arena, uint64_t count, uint64_t size) {
  uint64_t bytes = 0, start = 0, end = 0;
  if (!elm_checked_add(arena->used, 63, &start) || !elm_checked_mul(count, size, &bytes) ||
      !elm_checked_add(start &= ~UINT64_C(63), bytes, &end) || end > SIZE_MAX) {
    arena->has_overflow = true;
    return NULL;
  }
  arena->used = end;
  return arena->base == NULL ? NULL : arena->base + start;
}
