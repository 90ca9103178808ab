/* Products of E4 and E5 weights for AVX2; the including file defines ELM_FORMAT. */
#include "kernels/matmul/grouped_avx2.h"

/* Codes as bytes, line k/4 being 16 rows x 4 k, and s of group g in both 16-bit halves of a row's
 * word. */
typedef struct expanded_tile {
  _Alignas(64) uint8_t codes[ELM_SUPERBLOCK / 4 * ELM_LINE];
  _Alignas(64) uint8_t scale[ELM_SUPERBLOCK / ELM_GROUP * ELM_LINE];
} expanded_tile;

static inline void store_half_line(uint8_t* line, size_t half, __m256i value) {
  _mm256_store_si256((__m256i*)(void*)(line + 32 * half), value);
}

static inline void expand_tile(const uint8_t* tile, size_t cols, expanded_tile* out) {
  for (size_t h = 0; h < 2; ++h) {
    __m256i word = load_half_line(tile + elm_code_bytes(ELM_FORMAT, cols), h);
    for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
      const uint8_t* group = tile + g * elm_group_bytes(ELM_FORMAT);
      __m256i fifth = load_fifth(ELM_FORMAT, group, h);
      for (size_t l = 0; l < 4; ++l) {
        __m256i low, high;
        unpack_half_line(ELM_FORMAT, group + l * ELM_LINE, h, &fifth, &low, &high);
        uint8_t* to = out->codes + (4 * g + l) * 2 * ELM_LINE;
        store_half_line(to, h, low);
        store_half_line(to + ELM_LINE, h, high);
      }
      store_half_line(out->scale + g * ELM_LINE, h, low_nibble_pairs(word));
      word = _mm256_srli_epi32(word, 4);
    }
  }
}

/* Codes times activations are added up in 16 bits, then multiplied by s while they widen; sum_g z *
 * gsum is taken off at the end. */
static inline __attribute__((always_inline)) void block_times(const elm_q8* x,
                                                              const expanded_tile* tile,
                                                              const uint8_t* scales, size_t s,
                                                              size_t first_row, size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  const size_t cols = elm_superblock_cols(x->num_cols, s);
  const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
  __m256i sum[4][2];
  for (size_t m = 0; m < count; ++m) {
    sum[m][0] = sum[m][1] = _mm256_setzero_si256();
  }
  for (size_t first_k = 0; first_k < cols; first_k += 8 * LINES_IN_16_BITS) {
    __m256i dot[4][2];
    for (size_t m = 0; m < count; ++m) {
      dot[m][0] = dot[m][1] = _mm256_setzero_si256();
    }
    for (size_t k = first_k; k < first_k + 8 * LINES_IN_16_BITS; k += 8) {
      const uint8_t* line = tile->codes + k / 4 * ELM_LINE;
      const __m256i first[2] = {load_half_line(line, 0), load_half_line(line, 1)};
      const __m256i second[2] = {load_half_line(line, 2), load_half_line(line, 3)};
      for (size_t m = 0; m < count; ++m) {
        const __m256i a = broadcast4(q + m * x->stride + k);
        const __m256i b = broadcast4(q + m * x->stride + k + 4);
        for (size_t h = 0; h < 2; ++h) {
          const __m256i pair = _mm256_add_epi16(_mm256_maddubs_epi16(first[h], a),
                                                _mm256_maddubs_epi16(second[h], b));
          dot[m][h] = settled(_mm256_add_epi16(dot[m][h], pair));
        }
      }
    }
    for (size_t h = 0; h < 2; ++h) {
      const __m256i scale = load_half_line(tile->scale + first_k / ELM_GROUP * ELM_LINE, h);
      for (size_t m = 0; m < count; ++m) {
        sum[m][h] = _mm256_add_epi32(sum[m][h], _mm256_madd_epi16(dot[m][h], scale));
      }
    }
  }
  for (size_t m = 0; m < count; ++m) {
    const size_t block = (first_row + m) * x->num_superblocks + s;
    for (size_t h = 0; h < 2; ++h) {
      const __m256i zero = zero_times(scales, h, x->gsum + 8 * block);
      add_scaled(acc[m] + 8 * h, _mm256_sub_epi32(sum[m][h], zero), scales + 3 * ELM_LINE, h,
                 x->d[block]);
    }
  }
}

#include "kernels/matmul/gemm_grouped_chunks.inl"
