#include "format/file.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/crc32c.h"
#include "base/sha256.h"
#include "format/file_internal.h"
#include "format/map.h"
#include "format/meta.h"

/* Offsets within the superblock and within an entry of the section table. */
enum { BLOCK_MODEL_ID = 0x40, BLOCK_CRC = 0x60 };
enum { ENTRY_CRC = 28, ENTRY_TAG = 64, ENTRY_ZERO = 96, TAG_BYTES = 32 };

elm_status elm_file_fail(const elm_file* file, elm_error* error, const char* name,
                         const char* format, ...) {
  char what[256];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  return elm_fail(error, ELM_STATUS_FORMAT,
                  "%.160s: section %s: %s; copy, download or export the file again", file->path,
                  name, what);
}

bool elm_file_name(const uint8_t* field, size_t size, bool (*is_allowed)(uint8_t), char* out) {
  size_t length = 0;
  while (length < size && is_allowed(field[length])) {
    out[length] = (char)field[length];
    ++length;
  }
  out[length] = 0;
  return elm_is_zero(field + length, size - length);
}

static bool is_tag_char(uint8_t c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.';
}

/* ---- superblock ---------------------------------------------------------------------------- */

static elm_status fail_foreign(const elm_file* file, elm_error* error) {
  static const char lfs[] = "version https://git-lfs";
  const char* what = "not a .edge file; make one with: edgellm export MODEL -o FILE.edge";
  if (file->size == 0) {
    what = "an empty file; copy, download or export it again";
  } else if (file->size >= 4 && memcmp(file->data, "GGUF", 4) == 0) {
    what = "a GGUF file; run: edgellm export FILE.gguf -o FILE.edge";
  } else if (file->size >= sizeof lfs && memcmp(file->data, lfs, sizeof lfs - 1) == 0) {
    what = "a Git LFS pointer, not the file itself; run: git lfs pull";
  }
  return elm_fail(error, ELM_STATUS_FORMAT, "%.160s: %s", file->path, what);
}

static elm_status read_superblock(elm_file* file, const elm_crc32c_table* crc, elm_error* error) {
  static const char name[] = "superblock";
  const uint8_t* block = file->data;
  if (file->size < 8 || memcmp(block, ELM_MAGIC, 8) != 0) {
    return fail_foreign(file, error);
  }
  if (file->size < ELM_SUPERBLOCK_BYTES) {
    return elm_file_fail(file, error, name, "truncated: %zu bytes, not %d", file->size,
                         ELM_SUPERBLOCK_BYTES);
  }
  const unsigned major = (unsigned)block[8] | (unsigned)block[9] << 8;
  if (major != ELM_MAJOR) {
    return elm_file_fail(file, error, name, "format %u, and this edgellm reads %d", major,
                         ELM_MAJOR);
  }
  if (elm_crc32c(crc, block, BLOCK_CRC) != elm_load_u32(block + BLOCK_CRC)) {
    return elm_file_fail(file, error, name, "CRC differs: the file is damaged");
  }
  const uint64_t file_size = elm_load_u64(block + 0x10);
  if (file_size != file->size) {
    return elm_file_fail(file, error, name, "the file has %zu bytes, not %llu", file->size,
                         (unsigned long long)file_size);
  }
  const uint64_t unknown = elm_load_u64(block + 0x18) & ~(uint64_t)ELM_KNOWN_INCOMPATIBLE;
  if (unknown != 0) {
    int bit = 0;
    while ((unknown >> bit & 1) == 0) {
      ++bit;
    }
    return elm_file_fail(file, error, name, "needs feature %d, unknown here: update edgellm", bit);
  }
  if (elm_load_u32(block + 0x0C) != ELM_SUPERBLOCK_BYTES ||
      elm_load_u64(block + 0x28) != ELM_SUPERBLOCK_BYTES ||
      elm_load_u32(block + 0x34) != ELM_SECTION_ENTRY_BYTES || elm_load_u64(block + 0x38) != 0 ||
      !elm_is_zero(block + BLOCK_CRC + 4, ELM_SUPERBLOCK_BYTES - BLOCK_CRC - 4)) {
    return elm_file_fail(file, error, name, "a fixed field has another value");
  }
  file->num_sections = elm_load_u32(block + 0x30);
  const uint64_t table_bytes = (uint64_t)file->num_sections * ELM_SECTION_ENTRY_BYTES;
  if (file->num_sections < 1 || file->num_sections > ELM_MAX_SECTIONS ||
      table_bytes > file->size - ELM_SUPERBLOCK_BYTES) {
    return elm_file_fail(file, error, name, "%lu sections do not fit",
                         (unsigned long)file->num_sections);
  }
  elm_sha256(block + ELM_SUPERBLOCK_BYTES, (size_t)table_bytes, file->model_id);
  if (memcmp(file->model_id, block + BLOCK_MODEL_ID, sizeof file->model_id) != 0) {
    return elm_file_fail(file, error, "table", "SHA-256 differs: the file is damaged");
  }
  return ELM_STATUS_OK;
}

/* ---- section table ------------------------------------------------------------------------- */

/* Name and most bytes of each known type; the type is the index. */
static const struct {
  const char* name;
  uint64_t max_bytes;
} kinds[] = {
    [ELM_SECTION_META] = {"META", ELM_MAX_META_BYTES},
    [ELM_SECTION_TOKENIZER] = {"TOKENIZER", ELM_MAX_TOKENIZER_BYTES},
    [ELM_SECTION_CHAT_TEMPLATE] = {"CHAT_TEMPLATE", ELM_MAX_CHAT_TEMPLATE_BYTES},
    [ELM_SECTION_GENERATION_CONFIG] = {"GENERATION_CONFIG", ELM_MAX_GENERATION_CONFIG_BYTES},
    [ELM_SECTION_TEST_VECTORS] = {"TEST_VECTORS", ELM_MAX_TEST_VECTORS_BYTES},
    [ELM_SECTION_TENSOR_INDEX] = {"TENSOR_INDEX",
                                  (uint64_t)ELM_MAX_TENSORS * ELM_TENSOR_ENTRY_BYTES},
    [ELM_SECTION_WEIGHTS] = {"WEIGHTS", ELM_MAX_WEIGHTS_BYTES},
};

static bool is_known(uint32_t type) { return type >= 1 && type <= ELM_SECTION_WEIGHTS; }

static elm_status read_section(elm_file* file, uint32_t number, elm_error* error) {
  const uint8_t* entry =
      file->data + ELM_SUPERBLOCK_BYTES + (size_t)number * ELM_SECTION_ENTRY_BYTES;
  elm_section* out = &file->sections[number];
  char tag[TAG_BYTES + 1];
  *out = (elm_section){.type = elm_load_u32(entry),
                       .flags = elm_load_u32(entry + 4),
                       .offset = elm_load_u64(entry + 8),
                       .size = elm_load_u64(entry + 16),
                       .align_log2 = elm_load_u32(entry + 24),
                       .crc = elm_load_u32(entry + ENTRY_CRC)};
  if (!elm_file_name(entry + ENTRY_TAG, TAG_BYTES, is_tag_char, tag) ||
      !elm_is_zero(entry + ENTRY_ZERO, ELM_SECTION_ENTRY_BYTES - ENTRY_ZERO)) {
    (void)snprintf(out->label, sizeof out->label, "number %lu", (unsigned long)number);
    return elm_file_fail(file, error, out->label, "the tag is not a name or padding is not zero");
  }
  if (is_known(out->type)) {
    (void)snprintf(out->label, sizeof out->label, tag[0] != 0 ? "%s %s" : "%s%s",
                   kinds[out->type].name, tag);
  } else {
    (void)snprintf(out->label, sizeof out->label, "type %lu %s", (unsigned long)out->type, tag);
  }
  if ((out->flags & ~(uint32_t)ELM_FLAG_MUST_UNDERSTAND) != 0 ||
      (out->flags != 0 && !is_known(out->type))) {
    return elm_file_fail(file, error, out->label, "must be understood and is not: update edgellm");
  }
  const bool is_tagged = out->type == ELM_SECTION_CHAT_TEMPLATE || out->type == ELM_SECTION_WEIGHTS;
  if (is_known(out->type) && (tag[0] != 0) != is_tagged) {
    return elm_file_fail(file, error, out->label, "has a tag or lacks one");
  }
  if (out->align_log2 < ELM_MIN_ALIGN_LOG2 || out->align_log2 > ELM_MAX_ALIGN_LOG2 ||
      (out->type == ELM_SECTION_WEIGHTS && out->align_log2 != ELM_WEIGHTS_ALIGN_LOG2)) {
    return elm_file_fail(file, error, out->label, "alignment 2^%lu is not allowed",
                         (unsigned long)out->align_log2);
  }
  if (out->offset % ((uint64_t)1 << out->align_log2) != 0) {
    return elm_file_fail(file, error, out->label, "is not aligned");
  }
  const uint64_t most = is_known(out->type) ? kinds[out->type].max_bytes : ELM_MAX_WEIGHTS_BYTES;
  if (out->size < 1 || out->size > most || out->offset > file->size ||
      out->size > file->size - out->offset) {
    return elm_file_fail(file, error, out->label, "%llu bytes at %llu are too many or none",
                         (unsigned long long)out->size, (unsigned long long)out->offset);
  }
  return ELM_STATUS_OK;
}

const elm_section* elm_file_section(const elm_file* file, const char* label) {
  for (uint32_t i = 0; i < file->num_sections; ++i) {
    if (strcmp(file->sections[i].label, label) == 0) {
      return &file->sections[i];
    }
  }
  return NULL;
}

static elm_status read_table(elm_file* file, elm_error* error) {
  static const char* const required[] = {"META", "TOKENIZER", "TEST_VECTORS", "TENSOR_INDEX",
                                         "WEIGHTS globals"};
  file->sections = file->allocator.allocate(
      file->allocator.context, (size_t)file->num_sections * sizeof file->sections[0], 64);
  if (file->sections == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for %lu sections",
                    (unsigned long)file->num_sections);
  }
  memset(file->sections, 0, (size_t)file->num_sections * sizeof file->sections[0]);
  uint64_t end = ELM_SUPERBLOCK_BYTES + (uint64_t)file->num_sections * ELM_SECTION_ENTRY_BYTES;
  for (uint32_t i = 0; i < file->num_sections; ++i) {
    const elm_status status = read_section(file, i, error);
    if (status != ELM_STATUS_OK) {
      return status;
    }
    const elm_section* item = &file->sections[i];
    if (elm_file_section(file, item->label) != item) {
      return elm_file_fail(file, error, item->label, "there twice");
    }
    if (item->offset < end || item->offset - end >= (uint64_t)1 << item->align_log2) {
      return elm_file_fail(file, error, item->label, "overlaps or leaves a gap");
    }
    if (!elm_is_zero(file->data + end, item->offset - end)) {
      return elm_file_fail(file, error, item->label, "bytes before it are not zero");
    }
    end = item->offset + item->size;
    file->weight_bytes += item->type == ELM_SECTION_WEIGHTS ? item->size : 0;
  }
  if (end != file->size) {
    return elm_file_fail(file, error, file->sections[file->num_sections - 1].label,
                         "does not end with the file");
  }
  for (size_t i = 0; i < sizeof required / sizeof required[0]; ++i) {
    if (elm_file_section(file, required[i]) == NULL) {
      return elm_file_fail(file, error, required[i], "missing");
    }
  }
  return ELM_STATUS_OK;
}

static elm_status check_crcs(const elm_file* file, const elm_crc32c_table* crc, bool verify_weights,
                             elm_error* error) {
  for (uint32_t i = 0; i < file->num_sections; ++i) {
    const elm_section* item = &file->sections[i];
    const bool is_read = is_known(item->type) && item->type != ELM_SECTION_WEIGHTS;
    if ((is_read || verify_weights) &&
        elm_crc32c(crc, file->data + item->offset, (size_t)item->size) != item->crc) {
      return elm_file_fail(file, error, item->label, "CRC differs: the content is damaged");
    }
  }
  return ELM_STATUS_OK;
}

/* ---- opening ------------------------------------------------------------------------------- */

static elm_status read_meta(elm_file* file, elm_error* error) {
  const elm_section* item = elm_file_section(file, "META");
  char problem[200];
  const elm_status status =
      elm_meta_read((const char*)file->data + item->offset, (size_t)item->size, &file->allocator,
                    &file->arch, problem, sizeof problem);
  if (status == ELM_STATUS_FORMAT) {
    return elm_file_fail(file, error, "META", "%s", problem);
  }
  return status == ELM_STATUS_OK ? status : elm_fail(error, status, "META: %s", problem);
}

static elm_status read_all(elm_file* file, bool verify_weights, elm_error* error) {
  elm_crc32c_table crc;
  elm_crc32c_init(&crc);
  elm_status status = read_superblock(file, &crc, error);
  if (status == ELM_STATUS_OK) {
    status = read_table(file, error);
  }
  if (status == ELM_STATUS_OK) {
    status = check_crcs(file, &crc, verify_weights, error);
  }
  if (status == ELM_STATUS_OK) {
    status = read_meta(file, error);
  }
  if (status == ELM_STATUS_OK) {
    status = elm_file_read_index(file, verify_weights, error);
  }
  return status;
}

/* Takes over the map, if there is one. */
static elm_status open_bytes(const uint8_t* data, size_t size, const char* path, void* map,
                             bool verify_weights, const elm_allocator* allocator, elm_file** out,
                             elm_error* error) {
  elm_file* file = allocator->allocate(allocator->context, sizeof *file, 64);
  if (file == NULL) {
    elm_map_close(map, size);
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "%.200s: no memory to open it", path);
  }
  *file = (elm_file){.allocator = *allocator, .data = data, .size = size, .map = map, .path = path};
  const elm_status status = read_all(file, verify_weights, error);
  file->path = NULL;
  if (status != ELM_STATUS_OK) {
    elm_file_close(file);
    return status;
  }
  *out = file;
  return ELM_STATUS_OK;
}

elm_status elm_file_open(const char* path, bool verify_weights, const elm_allocator* allocator,
                         elm_file** out, elm_error* error) {
  void* map;
  size_t size;
  *out = NULL;
  const elm_status status = elm_map_open(path, &map, &size, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  return open_bytes(map, size, path, map, verify_weights, allocator, out, error);
}

elm_status elm_file_open_memory(const uint8_t* data, size_t size, bool verify_weights,
                                const elm_allocator* allocator, elm_file** out, elm_error* error) {
  *out = NULL;
  return open_bytes(data, size, "memory", NULL, verify_weights, allocator, out, error);
}

void elm_file_close(elm_file* file) {
  if (file == NULL) {
    return;
  }
  const elm_allocator memory = file->allocator;
  if (file->arch.layers != NULL) {
    memory.release(memory.context, file->arch.layers,
                   (size_t)file->arch.num_layers * sizeof file->arch.layers[0]);
  }
  if (file->tensors != NULL) {
    memory.release(memory.context, file->tensors, file->num_tensors * sizeof file->tensors[0]);
  }
  if (file->sections != NULL) {
    memory.release(memory.context, file->sections,
                   (size_t)file->num_sections * sizeof file->sections[0]);
  }
  elm_map_close(file->map, file->size);
  memory.release(memory.context, file, sizeof *file);
}

/* ---- access -------------------------------------------------------------------------------- */

const elm_arch* elm_file_arch(const elm_file* file) { return &file->arch; }

const elm_tensor* elm_file_tensor(const elm_file* file, const char* name) {
  size_t low = 0;
  size_t high = file->num_tensors;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    const int order = strcmp(file->tensors[middle].name, name);
    if (order == 0) {
      return &file->tensors[middle];
    }
    if (order < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return NULL;
}

elm_status elm_file_require(const elm_file* file, const char* name, uint32_t formats, uint64_t rows,
                            uint64_t cols, const elm_tensor** out, elm_error* error) {
  const elm_tensor* tensor = elm_file_tensor(file, name);
  *out = NULL;
  if (tensor == NULL) {
    return elm_fail(error, ELM_STATUS_FORMAT, "tensor %.64s is missing; export the model again",
                    name);
  }
  if ((formats >> tensor->format & 1) == 0) {
    return elm_fail(error, ELM_STATUS_FORMAT,
                    "tensor %s has format %d, which is not used for it; export the model again",
                    tensor->name, (int)tensor->format);
  }
  if (tensor->rows != rows || tensor->cols != cols) {
    return elm_fail(error, ELM_STATUS_FORMAT,
                    "tensor %s is (%llu, %llu), META asks for (%llu, %llu); export the model again",
                    tensor->name, (unsigned long long)tensor->rows,
                    (unsigned long long)tensor->cols, (unsigned long long)rows,
                    (unsigned long long)cols);
  }
  *out = tensor;
  return ELM_STATUS_OK;
}

size_t elm_file_num_tensors(const elm_file* file) { return file->num_tensors; }

const elm_tensor* elm_file_tensor_at(const elm_file* file, size_t index) {
  return index < file->num_tensors ? &file->tensors[index] : NULL;
}

uint64_t elm_file_bytes(const elm_file* file) { return file->size; }

uint64_t elm_file_weight_bytes(const elm_file* file) { return file->weight_bytes; }

const uint8_t* elm_file_model_id(const elm_file* file) { return file->model_id; }
