/* Mapping a file read-only: all of the operating system that the reader needs. */
#ifndef ELM_FORMAT_MAP_H
#define ELM_FORMAT_MAP_H

#include "base/status.h"

/* Maps the whole of a regular file; *map is NULL and *size 0 if it is empty. */
elm_status elm_map_open(const char* path, void** map, size_t* size, elm_error* error);
void elm_map_close(void* map, size_t size);

#endif
