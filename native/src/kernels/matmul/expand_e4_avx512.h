#ifndef ELM_KERNELS_MATMUL_EXPAND_E4_AVX512_H
#define ELM_KERNELS_MATMUL_EXPAND_E4_AVX512_H

#include <immintrin.h>

#include "kernels/tile.h"

/* Writes an E4 tile's weights + offset = s * q + (offset - z), modulo 256, as cols/4 lines of 16
 * rows x 4 k, with one 16-bit multiply of packed bytes: s * q <= 225. */
static inline void expand_e4(const uint8_t* tile, size_t cols, int8_t offset, uint8_t* out) {
  const uint8_t* scales = tile + cols / 8 * ELM_LINE;
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i word = _mm512_load_si512(scales);
  for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
    const __m512i s = _mm512_and_si512(word, _mm512_set1_epi32(15));
    const __m512i scale = _mm512_or_si512(s, _mm512_slli_epi32(s, 16));
    word = _mm512_srli_epi32(word, 4);
    const __m512i z = _mm512_load_si512(scales + ELM_LINE * (1 + g / 4));
    /* byte g % 4 of every 32-bit word, four times */
    const __m512i place = _mm512_add_epi8(_mm512_set4_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0),
                                          _mm512_set1_epi8((char)(g % 4)));
    const __m512i constant =
        _mm512_sub_epi8(_mm512_set1_epi8(offset), _mm512_shuffle_epi8(z, place));
    for (size_t l = 0; l < 4; ++l) {
      const __m512i line = _mm512_load_si512(tile + (4 * g + l) * ELM_LINE);
      const __m512i low = _mm512_and_si512(line, nibble);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
      uint8_t* to = out + (4 * g + l) * 2 * ELM_LINE;
      _mm512_store_si512(to, _mm512_add_epi8(_mm512_mullo_epi16(low, scale), constant));
      _mm512_store_si512(to + ELM_LINE, _mm512_add_epi8(_mm512_mullo_epi16(high, scale), constant));
    }
  }
}

#endif
