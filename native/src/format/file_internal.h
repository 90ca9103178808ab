/* What the parts of the reader share: file.c (superblock, sections, access) and index.c (tensors).
 */
#ifndef ELM_FORMAT_FILE_INTERNAL_H
#define ELM_FORMAT_FILE_INTERNAL_H

#include <string.h>

#include "format/file.h"
#include "format/limits.h"

typedef struct elm_section {
  uint32_t type;
  uint32_t flags;
  uint64_t offset;
  uint64_t size;
  uint32_t align_log2;
  uint32_t crc;
  uint64_t tiled; /* WEIGHTS: end of the tensors found so far */
  char label[64]; /* how messages name it: "WEIGHTS layers.3" */
} elm_section;

struct elm_file {
  elm_allocator allocator;
  const uint8_t* data;
  size_t size;
  void* map;        /* the same as data, or NULL if the bytes are the caller's */
  const char* path; /* while opening */
  elm_section* sections;
  uint32_t num_sections;
  elm_tensor* tensors; /* (num_tensors), by name */
  size_t num_tensors;
  elm_arch arch;
  uint64_t weight_bytes;
  uint8_t model_id[32];
};

/* A FORMAT error that names the file and the section. */
elm_status elm_file_fail(const elm_file* file, elm_error* error, const char* name,
                         const char* format, ...) ELM_PRINTF(4, 5);
/* NULL if there is none of that label. */
const elm_section* elm_file_section(const elm_file* file, const char* label);
/* Copies a zero-padded name of at most `size` characters, and a zero; false if a character is not
 * allowed or bytes follow the name's end. */
bool elm_file_name(const uint8_t* field, size_t size, bool (*is_allowed)(uint8_t), char* out);
/* Reads and checks the tensor index. */
elm_status elm_file_read_index(elm_file* file, bool verify_weights, elm_error* error);

static inline uint32_t elm_load_u32(const uint8_t* data) {
  return (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
         (uint32_t)data[3] << 24;
}

static inline uint64_t elm_load_u64(const uint8_t* data) {
  return (uint64_t)elm_load_u32(data) | (uint64_t)elm_load_u32(data + 4) << 32;
}

/* The first byte is zero and every byte equals the one before it. */
static inline bool elm_is_zero(const uint8_t* data, uint64_t size) {
  return size == 0 || (data[0] == 0 && memcmp(data, data + 1, (size_t)size - 1) == 0);
}

#endif
