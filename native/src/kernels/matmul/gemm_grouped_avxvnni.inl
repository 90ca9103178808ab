/* Products of E4 and E5 weights for AVX-VNNI; the including file defines ELM_FORMAT. */
#include "kernels/matmul/avxvnni.h"
#include "kernels/matmul/grouped_avx2.h"

typedef struct expanded_tile {
  _Alignas(64) uint8_t weights[ELM_SUPERBLOCK / 4 * ELM_LINE]; /* + 128; line k/4: 16 rows x 4 k */
} expanded_tile;

static inline void expand_line(__m256i codes, __m256i scale, __m256i offset, uint8_t* to) {
  const __m256i product = _mm256_mullo_epi16(codes, scale);
  _mm256_store_si256((__m256i*)(void*)to, _mm256_add_epi8(product, offset));
}

/* s * q + (128 - z), all below 256, with one 16-bit multiply of packed bytes. */
static inline void expand_tile(const uint8_t* tile, size_t cols, expanded_tile* out) {
  const uint8_t* scales = tile + elm_code_bytes(ELM_FORMAT, cols);
  for (size_t h = 0; h < 2; ++h) {
    __m256i word = load_half_line(scales, h);
    for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
      const __m256i scale = low_nibble_pairs(word);
      word = _mm256_srli_epi32(word, 4);
      /* byte g % 4 of every 32-bit word, four times */
      const __m256i words = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C, 0, 0x04040404,
                                              0x08080808, 0x0C0C0C0C);
      const __m256i place = _mm256_add_epi8(words, _mm256_set1_epi8((char)(g % 4)));
      const __m256i z = load_half_line(scales + ELM_LINE * (1 + g / 4), h);
      const __m256i offset = _mm256_sub_epi8(_mm256_set1_epi8(-128), _mm256_shuffle_epi8(z, place));
      const uint8_t* group = tile + g * elm_group_bytes(ELM_FORMAT);
      __m256i fifth = load_fifth(ELM_FORMAT, group, h);
      for (size_t l = 0; l < 4; ++l) {
        __m256i low, high;
        unpack_half_line(ELM_FORMAT, group + l * ELM_LINE, h, &fifth, &low, &high);
        uint8_t* to = out->weights + (4 * g + l) * 2 * ELM_LINE + 32 * h;
        expand_line(low, scale, offset, to);
        expand_line(high, scale, offset, to + ELM_LINE);
      }
    }
  }
}

static inline __attribute__((always_inline)) void block_times(const elm_q8* x,
                                                              const expanded_tile* tile,
                                                              const uint8_t* scales, size_t s,
                                                              size_t first_row, size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  int8_times(x, tile->weights, false, scales + 3 * ELM_LINE, s, first_row, count, acc);
}

#include "kernels/matmul/gemm_grouped_chunks.inl"
