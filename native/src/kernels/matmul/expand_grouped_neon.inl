/* Expands an E4 or E5 tile to int8 for NEON. The including file defines ELM_FORMAT and
 *   expanded_tile
 *   store_line(out, l, v, first, second)
 *                        keeps what quarter v of code line l stands for: `first` is 4 rows x the
 *                        first 4 k, `second` the same rows x the other 4. */
#include "kernels/matmul/neon.h"

/* The lowest byte of every word in all four of its bytes. */
static inline uint8x16_t four_times(uint32x4_t word) {
  return vreinterpretq_u8_u32(vmulq_n_u32(word, UINT32_C(0x01010101)));
}

static inline void expand_tile(const uint8_t* tile, size_t cols, expanded_tile* out) {
  const uint8_t* scales = tile + elm_code_bytes(ELM_FORMAT, cols);
  for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
    const uint8_t* group = tile + g * elm_group_bytes(ELM_FORMAT);
    const int32x4_t right = vdupq_n_s32(-8 * (int32_t)(g % 4));
    for (size_t v = 0; v < 4; ++v) {
      const uint8x16_t scale = four_times(group_scale(load_quarter(scales, v), g));
      const uint8x16_t bytes = load_quarter(scales + (1 + g / 4) * ELM_LINE, v);
      const uint32x4_t shifted = vshlq_u32(vreinterpretq_u32_u8(bytes), right);
      const uint8x16_t zero = four_times(vandq_u32(shifted, vdupq_n_u32(0xFF)));
      uint8x16_t fifth = load_fifth(ELM_FORMAT, group, v);
      for (size_t l = 0; l < 4; ++l) {
        uint8x16_t low, high;
        unpack_quarter(ELM_FORMAT, group + l * ELM_LINE, v, &fifth, &low, &high);
        store_line(out, 4 * g + l, v, vsubq_u8(vmulq_u8(low, scale), zero),
                   vsubq_u8(vmulq_u8(high, scale), zero));
      }
    }
  }
}
