/* Codes of E4 and E5 for AVX2; `format` is a constant everywhere. */
#ifndef ELM_KERNELS_MATMUL_GROUPED_AVX2_H
#define ELM_KERNELS_MATMUL_GROUPED_AVX2_H

#include "kernels/matmul/avx2.h"

/* Code lines whose products with activations fit into 16 bits: 4 * 4 * 15 * 127 < 32,768 and
 * 2 * 4 * 31 * 127 < 32,768. */
#define LINES_IN_16_BITS (ELM_FORMAT == ELM_FORMAT_E4 ? 4 : 2)

/* Half of the line of fifth bits of a group, for unpack_half_line. */
static inline __m256i load_fifth(elm_format format, const uint8_t* group, size_t half) {
  return format == ELM_FORMAT_E5 ? load_half_line(group + 4 * ELM_LINE, half)
                                 : _mm256_setzero_si256();
}

/* Codes of half a line: `low` are 8 rows x the first 4 k, `high` the other 4. Lines of a group in
 * order: those of the next line move to the bits 0 and 4 of *fifth. */
static inline __attribute__((always_inline)) void unpack_half_line(elm_format format,
                                                                   const uint8_t* line, size_t half,
                                                                   __m256i* fifth, __m256i* low,
                                                                   __m256i* high) {
  const __m256i nibble = _mm256_set1_epi8(15), sixteen = _mm256_set1_epi8(16);
  const __m256i codes = load_half_line(line, half);
  *low = _mm256_and_si256(codes, nibble);
  *high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
  if (format == ELM_FORMAT_E5) {
    const __m256i low_fifth = _mm256_and_si256(_mm256_slli_epi16(*fifth, 4), sixteen);
    *low = _mm256_or_si256(*low, low_fifth);
    *high = _mm256_or_si256(*high, _mm256_and_si256(*fifth, sixteen));
    *fifth = _mm256_srli_epi16(*fifth, 1);
  }
}

static inline void prefetch_group(elm_format format, const uint8_t* group) {
  for (size_t ahead = 0; ahead < elm_group_bytes(format); ahead += ELM_LINE) {
    _mm_prefetch((const char*)(group + ELM_PREFETCH_BYTES + ahead), _MM_HINT_T0);
  }
}

#endif
