/* The tensor index: names, formats, shapes, and that tensors tile their sections. */
#include "format/file_internal.h"

/* Within an entry. */
enum { NAME_BYTES = 64, TENSOR_ZERO = 104 };

static bool is_name_char(uint8_t c) { return c > ' ' && c <= '~'; }

static uint64_t align_up(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment; /* value is at most a file's size */
}

static elm_status read_tensor(elm_file* file, const uint8_t* entry, elm_tensor* out,
                              elm_error* error) {
  static const char index[] = "TENSOR_INDEX";
  const uint32_t format = elm_load_u32(entry + 64);
  *out = (elm_tensor){.section = elm_load_u32(entry + 68),
                      .rows = elm_load_u64(entry + 72),
                      .cols = elm_load_u64(entry + 80),
                      .size = elm_load_u64(entry + 96)};
  const uint64_t offset = elm_load_u64(entry + 88);
  if (!elm_file_name(entry, NAME_BYTES, is_name_char, out->name) || out->name[0] == 0) {
    return elm_file_fail(file, error, index, "name '%s' is not one", out->name);
  }
  if (format > ELM_FORMAT_E5) {
    return elm_file_fail(file, error, index, "tensor %s has unknown format %lu", out->name,
                         (unsigned long)format);
  }
  out->format = (elm_format)format;
  if (out->section >= file->num_sections ||
      file->sections[out->section].type != ELM_SECTION_WEIGHTS) {
    return elm_file_fail(file, error, index, "tensor %s is in section %lu, not of weights",
                         out->name, (unsigned long)out->section);
  }
  if (out->rows < 1 || out->rows > ELM_MAX_DIM || out->cols < 1 || out->cols > ELM_MAX_DIM ||
      !elm_is_zero(entry + TENSOR_ZERO, ELM_TENSOR_ENTRY_BYTES - TENSOR_ZERO)) {
    return elm_file_fail(file, error, index, "tensor %s has shape (%llu, %llu) or stray bytes",
                         out->name, (unsigned long long)out->rows, (unsigned long long)out->cols);
  }
  const elm_section* parent = &file->sections[out->section];
  if (out->size != elm_layout_bytes(out->format, out->rows, out->cols)) {
    return elm_file_fail(file, error, index, "tensor %s has %llu bytes, its shape asks for others",
                         out->name, (unsigned long long)out->size);
  }
  if (offset > parent->size || out->size > parent->size - offset) {
    return elm_file_fail(file, error, index, "tensor %s overlaps or leaves a gap", out->name);
  }
  out->data = file->data + parent->offset + offset;
  return ELM_STATUS_OK;
}

/* The data pointer alone orders them: sections are in rising order too. */
static bool is_before(const elm_file* file, uint32_t a, uint32_t b) {
  return (const uint8_t*)file->tensors[a].data < (const uint8_t*)file->tensors[b].data;
}

static void sift_down(const elm_file* file, uint32_t* heap, size_t root, size_t count) {
  for (size_t child = 2 * root + 1; child < count; child = 2 * root + 1) {
    if (child + 1 < count && is_before(file, heap[child], heap[child + 1])) {
      ++child;
    }
    if (!is_before(file, heap[root], heap[child])) {
      return;
    }
    const uint32_t moved = heap[root];
    heap[root] = heap[child];
    heap[child] = moved;
    root = child;
  }
}

/* Heapsort of tensor numbers by where they lie: no memory, and no input makes it slow. */
static void sort_by_place(const elm_file* file, uint32_t* order) {
  const size_t count = file->num_tensors;
  for (size_t i = count / 2; i-- > 0;) {
    sift_down(file, order, i, count);
  }
  for (size_t end = count; end-- > 1;) {
    const uint32_t largest = order[0];
    order[0] = order[end];
    order[end] = largest;
    sift_down(file, order, 0, end);
  }
}

/* Tensors of a section follow one another on the next 4 KiB and fill it. */
static elm_status check_tiling(elm_file* file, const uint32_t* order, bool verify_weights,
                               elm_error* error) {
  for (size_t i = 0; i < file->num_tensors; ++i) {
    const elm_tensor* tensor = &file->tensors[order[i]];
    elm_section* parent = &file->sections[tensor->section];
    const uint8_t* base = file->data + parent->offset;
    const uint64_t start = align_up(parent->tiled, ELM_TENSOR_ALIGN);
    if ((uint64_t)((const uint8_t*)tensor->data - base) != start) {
      return elm_file_fail(file, error, "TENSOR_INDEX", "tensor %s overlaps or leaves a gap",
                           tensor->name);
    }
    if (verify_weights && !elm_is_zero(base + parent->tiled, start - parent->tiled)) {
      return elm_file_fail(file, error, parent->label, "bytes before tensor %s are not zero",
                           tensor->name);
    }
    parent->tiled = start + tensor->size;
  }
  for (uint32_t i = 0; i < file->num_sections; ++i) {
    const elm_section* item = &file->sections[i];
    if (item->type == ELM_SECTION_WEIGHTS && item->tiled != item->size) {
      return elm_file_fail(file, error, item->label, "has %llu bytes, its tensors %llu",
                           (unsigned long long)item->size, (unsigned long long)item->tiled);
    }
  }
  return ELM_STATUS_OK;
}

static elm_status read_entries(elm_file* file, const uint8_t* entries, elm_error* error) {
  for (size_t i = 0; i < file->num_tensors; ++i) {
    elm_tensor* tensor = &file->tensors[i];
    const elm_status status =
        read_tensor(file, entries + i * ELM_TENSOR_ENTRY_BYTES, tensor, error);
    if (status != ELM_STATUS_OK) {
      return status;
    }
    if (i > 0 && strcmp(tensor[-1].name, tensor->name) >= 0) {
      return elm_file_fail(file, error, "TENSOR_INDEX", "name %s is out of order or repeated",
                           tensor->name);
    }
  }
  return ELM_STATUS_OK;
}

elm_status elm_file_read_index(elm_file* file, bool verify_weights, elm_error* error) {
  static const char name[] = "TENSOR_INDEX";
  const elm_allocator* memory = &file->allocator;
  const elm_section* index = elm_file_section(file, name);
  if (index->size % ELM_TENSOR_ENTRY_BYTES != 0) {
    return elm_file_fail(file, error, name, "%llu bytes are not a number of entries",
                         (unsigned long long)index->size);
  }
  const size_t count = (size_t)index->size / ELM_TENSOR_ENTRY_BYTES;
  file->num_tensors = count;
  file->tensors = memory->allocate(memory->context, count * sizeof file->tensors[0], 64);
  if (file->tensors == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for %zu tensors", count);
  }
  elm_status status = read_entries(file, file->data + index->offset, error);
  if (status != ELM_STATUS_OK) {
    return status;
  }
  uint32_t* order = memory->allocate(memory->context, count * sizeof order[0], 64);
  if (order == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for %zu tensors", count);
  }
  for (size_t i = 0; i < count; ++i) {
    order[i] = (uint32_t)i;
  }
  sort_by_place(file, order);
  status = check_tiling(file, order, verify_weights, error);
  memory->release(memory->context, order, count * sizeof order[0]);
  return status;
}
