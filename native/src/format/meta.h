/* META's "model" object. The rest of META is read from Python only. */
#ifndef ELM_FORMAT_META_H
#define ELM_FORMAT_META_H

#include "format/file.h"

/* Reads and checks `text`. On success arch->layers belongs to the caller, who releases
 * (num_layers) of them to `allocator`. On failure `problem` holds what is wrong with which member.
 */
elm_status elm_meta_read(const char* text, size_t size, const elm_allocator* allocator,
                         elm_arch* arch, char* problem, size_t capacity);

#endif
