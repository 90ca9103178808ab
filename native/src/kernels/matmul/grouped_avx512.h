/* Codes of E4 and E5 for AVX-512; `format` is a constant everywhere. */
#ifndef ELM_KERNELS_MATMUL_GROUPED_AVX512_H
#define ELM_KERNELS_MATMUL_GROUPED_AVX512_H

#include <immintrin.h>

#include "kernels/tile.h"

/* The line of fifth bits of a group, for unpack_line. */
static inline __m512i load_fifth(elm_format format, const uint8_t* group) {
  return format == ELM_FORMAT_E5 ? _mm512_load_si512(group + 4 * ELM_LINE) : _mm512_setzero_si512();
}

/* Codes of a line: `low` are 16 rows x the first 4 k, `high` the other 4. Lines of a group in
 * order: those of the next line move to the bits 0 and 4 of *fifth. */
static inline __attribute__((always_inline)) void unpack_line(elm_format format,
                                                              const uint8_t* line, __m512i* fifth,
                                                              __m512i* low, __m512i* high) {
  enum { WHERE_SET_SECOND_ELSE_THIRD = 0xCA };
  const __m512i nibble = _mm512_set1_epi8(15);
  const __m512i codes = _mm512_load_si512(line);
  *low = _mm512_and_si512(codes, nibble);
  *high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
  if (format == ELM_FORMAT_E5) {
    const __m512i pair = _mm512_and_si512(*fifth, _mm512_set1_epi8(0x11));
    *low = _mm512_ternarylogic_epi32(nibble, codes, _mm512_slli_epi16(pair, 4),
                                     WHERE_SET_SECOND_ELSE_THIRD);
    *high = _mm512_ternarylogic_epi32(nibble, _mm512_srli_epi16(codes, 4), pair,
                                      WHERE_SET_SECOND_ELSE_THIRD);
    *fifth = _mm512_srli_epi16(*fifth, 1);
  }
}

/* What turns the codes of group g into weights: s for both bytes of 16 bits, and offset - z. */
typedef struct group_scales {
  __m512i scale;
  __m512i constant;
} group_scales;

static inline group_scales load_group(const uint8_t* scales, size_t g, int8_t offset) {
  const __m512i word = _mm512_load_si512(scales);
  const __m512i s =
      _mm512_and_si512(_mm512_srli_epi32(word, (unsigned)(4 * g)), _mm512_set1_epi32(15));
  const __m512i z = _mm512_load_si512(scales + ELM_LINE * (1 + g / 4));
  /* byte g % 4 of every 32-bit word, four times */
  const __m512i place = _mm512_add_epi8(_mm512_set4_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0),
                                        _mm512_set1_epi8((char)(g % 4)));
  const group_scales group = {
      _mm512_or_si512(s, _mm512_slli_epi32(s, 16)),
      _mm512_sub_epi8(_mm512_set1_epi8(offset), _mm512_shuffle_epi8(z, place)),
  };
  return group;
}

/* Weights of codes in bytes, with one 16-bit multiply of packed bytes: s * q <= 248. */
static inline __m512i weights_of_codes(__m512i codes, group_scales group) {
  return _mm512_add_epi8(_mm512_mullo_epi16(codes, group.scale), group.constant);
}

/* Writes a tile's weights + offset = s * q + (offset - z), modulo 256, as cols/4 lines of 16 rows x
 * 4 k. */
static inline __attribute__((always_inline)) void expand_grouped(elm_format format,
                                                                 const uint8_t* tile, size_t cols,
                                                                 int8_t offset, uint8_t* out) {
  const uint8_t* scales = tile + elm_code_bytes(format, cols);
  for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
    const uint8_t* codes = tile + g * elm_group_bytes(format);
    const group_scales group = load_group(scales, g, offset);
    __m512i fifth = load_fifth(format, codes);
    for (size_t l = 0; l < 4; ++l) {
      __m512i low, high;
      unpack_line(format, codes + l * ELM_LINE, &fifth, &low, &high);
      uint8_t* to = out + (4 * g + l) * 2 * ELM_LINE;
      _mm512_store_si512(to, weights_of_codes(low, group));
      _mm512_store_si512(to + ELM_LINE, weights_of_codes(high, group));
    }
  }
}

#endif
