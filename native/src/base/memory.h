/* The default allocator, and carving one block into aligned buffers. */
#ifndef ELM_BASE_MEMORY_H
#define ELM_BASE_MEMORY_H

#include "base/status.h"

/* The C library's; large blocks are mapped, so that untouched pages cost nothing. */
elm_allocator elm_allocator_default(void);

/* Hands out 64-byte aligned pieces of one block. With base NULL it only counts: run the same calls
 * twice, first to learn the size, then to place the buffers. */
typedef struct elm_arena {
  uint8_t* base;
  uint64_t used;
  bool has_overflow;
} elm_arena;

/* `count` items of `size` bytes; NULL while counting. */
void* elm_arena_take(elm_arena* arena, uint64_t count, uint64_t size);

#endif
