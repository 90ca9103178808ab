#include "base/crc32c.h"

#define POLYNOMIAL 0x82F63B78u /* bit-reversed */

void elm_crc32c_init(elm_crc32c_table* table) {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = value >> 1 ^ ((value & 1) != 0 ? POLYNOMIAL : 0);
    }
    table->remainder[0][byte] = value;
  }
  for (int zeros = 1; zeros < 8; ++zeros) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = table->remainder[zeros - 1][byte];
      table->remainder[zeros][byte] = before >> 8 ^ table->remainder[0][before & 255];
    }
  }
}

static uint32_t load_u32(const uint8_t* data) {
  return (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
         (uint32_t)data[3] << 24;
}

/* Eight bytes at a time: each byte's remainder is looked up for its own distance. */
uint32_t elm_crc32c(const elm_crc32c_table* table, const uint8_t* data, size_t size) {
  const uint32_t (*const t)[256] = table->remainder;
  uint32_t crc = 0xFFFFFFFFu;
  for (; size >= 8; size -= 8, data += 8) {
    const uint32_t low = crc ^ load_u32(data);
    const uint32_t high = load_u32(data + 4);
    crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^
          t[3][high & 255] ^ t[2][high >> 8 & 255] ^ t[1][high >> 16 & 255] ^ t[0][high >> 24];
  }
  for (; size > 0; --size, ++data) {
    crc = crc >> 8 ^ t[0][(crc ^ *data) & 255];
  }
  return crc ^ 0xFFFFFFFFu;
}
