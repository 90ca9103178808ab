/* Fuzz target of the .edge reader. Built with -DELM_FUZZ it is a libFuzzer target, otherwise a
 * program that replays the inputs named on its command line.
 *
 * An input is a compact file: superblock (0x64 bytes), section table, then the content of each
 * section but WEIGHTS, one after the other; a section takes what its entry says. The file is laid
 * out from it with zeros in between, and sizes and checksums are put right, so that a mutation
 * reaches what lies behind them. tests/fuzz/compact.py makes inputs from real files. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/sha256.h"
#include "format/file.h"
#include "format/limits.h"

enum { BLOCK = 0x64, CAPACITY = 1 << 18 };

static uint32_t load_u32(const uint8_t* data) {
  uint32_t value;
  memcpy(&value, data, sizeof value);
  return value;
}

static uint64_t load_u64(const uint8_t* data) {
  uint64_t value;
  memcpy(&value, data, sizeof value);
  return value;
}

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Moves up to `count` bytes of the input to `target`. */
static void take(const uint8_t** data, size_t* size, uint8_t* target, size_t count) {
  count = smaller(count, *size);
  memcpy(target, *data, count);
  *data += count;
  *size -= count;
}

/* Lays the file out in `file` (CAPACITY zero bytes) and returns its size. */
static size_t expand(const uint8_t* data, size_t size, uint8_t* file) {
  static elm_crc32c_table crc;
  if (crc.remainder[0][1] == 0) {
    elm_crc32c_init(&crc);
  }
  take(&data, &size, file, BLOCK);
  const size_t num_sections = smaller(load_u32(file + 0x30), 64);
  uint8_t* table = file + ELM_SUPERBLOCK_BYTES;
  const size_t table_bytes = num_sections * ELM_SECTION_ENTRY_BYTES;
  take(&data, &size, table, table_bytes);
  size_t end = ELM_SUPERBLOCK_BYTES + table_bytes;
  for (size_t i = 0; i < num_sections; ++i) {
    uint8_t* entry = table + i * ELM_SECTION_ENTRY_BYTES;
    const uint64_t offset = load_u64(entry + 8);
    const uint64_t length = load_u64(entry + 16);
    if (offset < ELM_SUPERBLOCK_BYTES + table_bytes || offset > CAPACITY ||
        length > CAPACITY - offset) {
      continue;
    }
    if (load_u32(entry) != ELM_SECTION_WEIGHTS) {
      take(&data, &size, file + offset, (size_t)length);
      const uint32_t sum = elm_crc32c(&crc, file + offset, (size_t)length);
      memcpy(entry + 28, &sum, sizeof sum);
    }
    end = (size_t)(offset + length) > end ? (size_t)(offset + length) : end;
  }
  const uint64_t file_size = end;
  memcpy(file + 0x10, &file_size, sizeof file_size);
  elm_sha256(table, table_bytes, file + 0x40);
  const uint32_t sum = elm_crc32c(&crc, file, 0x60);
  memcpy(file + 0x60, &sum, sizeof sum);
  return end;
}

static void* allocate(void* context, size_t size, size_t alignment) {
  (void)context;
  return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void* context, void* memory, size_t size) {
  (void)context;
  (void)size;
  free(memory);
}

/* Reads everything the runtime would. Returns 1 if the file was accepted. */
static int run(const uint8_t* file, size_t size) {
  const elm_allocator allocator = {NULL, allocate, release};
  elm_file* opened;
  elm_error error;
  if (elm_file_open_memory(file, size, false, &allocator, &opened, &error) != ELM_STATUS_OK) {
    return 0;
  }
  const elm_arch* arch = elm_file_arch(opened);
  volatile unsigned sum = (unsigned)arch->layers[arch->num_layers - 1].rope;
  for (size_t i = 0; i < elm_file_num_tensors(opened); ++i) {
    const elm_tensor* tensor = elm_file_tensor_at(opened, i);
    const elm_tensor* found;
    const uint8_t* bytes = tensor->data;
    if (elm_file_require(opened, tensor->name, 1u << tensor->format, tensor->rows, tensor->cols,
                         &found, &error) != ELM_STATUS_OK ||
        found != tensor) {
      abort();
    }
    sum += bytes[0] + bytes[tensor->size - 1];
  }
  elm_file_close(opened);
  return 1;
}

static int run_input(const uint8_t* data, size_t size) {
  static uint8_t file[CAPACITY]; /* zero between two inputs */
  const size_t length = expand(data, size, file);
  /* The copy ends where the file ends, so that AddressSanitizer sees a read beyond it. */
  void* exact = NULL;
  int accepted = 0;
  if (posix_memalign(&exact, 64, length) == 0) {
    memcpy(exact, file, length);
    accepted = run(exact, length);
  }
  free(exact);
  memset(file, 0, length);
  return accepted;
}

#ifdef ELM_FUZZ

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  (void)run_input(data, size);
  return 0;
}

#else

int main(int argc, char** argv) {
  static uint8_t data[CAPACITY];
  for (int i = 1; i < argc; ++i) {
    FILE* input = fopen(argv[i], "rb");
    if (input == NULL) {
      fprintf(stderr, "%s: cannot be opened\n", argv[i]);
      return 1;
    }
    const size_t size = fread(data, 1, sizeof data, input);
    (void)fclose(input);
    printf("%s: %s\n", argv[i], run_input(data, size) != 0 ? "accepted" : "refused");
  }
  return 0;
}

#endif
