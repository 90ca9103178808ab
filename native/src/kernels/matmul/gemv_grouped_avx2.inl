/* Products of few rows with E4 and E5 weights for AVX2; the including file defines
 * ELM_FORMAT. */
#include "kernels/matmul/grouped_avx2.h"

/* Codes times activations are added up in 16 bits, then multiplied by s while they widen; sum_g z *
 * gsum is taken off at the end. */
static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t first_row,
                                                              size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + elm_code_bytes(ELM_FORMAT, cols);
    const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
    __m256i word[2] = {load_half_line(scales, 0), load_half_line(scales, 1)};
    __m256i sum[ELM_GEMV_MAX_ROWS][2];
    for (size_t m = 0; m < count; ++m) {
      sum[m][0] = sum[m][1] = _mm256_setzero_si256();
    }
    for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
      const uint8_t* group = tile + g * elm_group_bytes(ELM_FORMAT);
      __m256i fifth[2] = {load_fifth(ELM_FORMAT, group, 0), load_fifth(ELM_FORMAT, group, 1)};
      prefetch_group(ELM_FORMAT, group);
      for (size_t first = 0; first < 4; first += LINES_IN_16_BITS) {
        __m256i dot[ELM_GEMV_MAX_ROWS][2];
        for (size_t m = 0; m < count; ++m) {
          dot[m][0] = dot[m][1] = _mm256_setzero_si256();
        }
        for (size_t l = first; l < first + LINES_IN_16_BITS; ++l) {
          __m256i low[2], high[2];
          for (size_t h = 0; h < 2; ++h) {
            unpack_half_line(ELM_FORMAT, group + l * ELM_LINE, h, &fifth[h], &low[h], &high[h]);
          }
          for (size_t m = 0; m < count; ++m) {
            const int8_t* at = q + m * x->stride + g * ELM_GROUP + 8 * l;
            const __m256i a = broadcast4(at), b = broadcast4(at + 4);
            for (size_t h = 0; h < 2; ++h) {
              const __m256i pair = _mm256_add_epi16(_mm256_maddubs_epi16(low[h], a),
                                                    _mm256_maddubs_epi16(high[h], b));
              dot[m][h] = settled(_mm256_add_epi16(dot[m][h], pair));
            }
          }
        }
        for (size_t h = 0; h < 2; ++h) {
          const __m256i scale = low_nibble_pairs(word[h]);
          for (size_t m = 0; m < count; ++m) {
            sum[m][h] = _mm256_add_epi32(sum[m][h], _mm256_madd_epi16(dot[m][h], scale));
          }
        }
      }
      word[0] = _mm256_srli_epi32(word[0], 4);
      word[1] = _mm256_srli_epi32(word[1], 4);
    }
    for (size_t m = 0; m < count; ++m) {
      const size_t block = (first_row + m) * x->num_superblocks + s;
      for (size_t h = 0; h < 2; ++h) {
        const __m256i zero = zero_times(scales, h, x->gsum + 8 * block);
        add_scaled(acc[m] + 8 * h, _mm256_sub_epi32(sum[m][h], zero), scales + 3 * ELM_LINE, h,
                   x->d[block]);
      }
    }
    tile = scales + 4 * ELM_LINE;
  }
}

#include "kernels/matmul/rows_by_four.inl"
