/* CRC-32C (Castagnoli). Source: RFC 3720, appendix B.4. */
#ifndef ELM_BASE_CRC32C_H
#define ELM_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* remainder[n][b]: of byte b followed by n zero bytes. 8 KiB, filled once by the caller. */
typedef struct elm_crc32c_table {
  uint32_t remainder[8][256];
} elm_crc32c_table;

void elm_crc32c_init(elm_crc32c_table* table);
uint32_t elm_crc32c(const elm_crc32c_table* table, const uint8_t* data, size_t size);

#endif
