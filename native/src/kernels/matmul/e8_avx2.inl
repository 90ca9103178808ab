/* The product of E8 weights for AVX2. vpmaddubsw wants its first factor unsigned: |w| times a with
 * w's sign, at most 2 * 127 * 127 < 32,768. */
#include <immintrin.h>

#include "kernels/matmul/avx2.h"
#include "kernels/tile.h"

static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t first_row,
                                                              size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  const __m256i ones = _mm256_set1_epi16(1);
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
    __m256i sum[ELM_GEMV_MAX_ROWS][2];
    for (size_t m = 0; m < count; ++m) {
      sum[m][0] = sum[m][1] = _mm256_setzero_si256();
    }
    for (size_t k = 0; k < cols; k += 4) {
      const uint8_t* line = tile + k / 4 * ELM_LINE;
      _mm_prefetch((const char*)(line + ELM_PREFETCH_BYTES), _MM_HINT_T0);
      for (size_t h = 0; h < 2; ++h) {
        const __m256i w = load_half_line(line, h);
        const __m256i magnitude = _mm256_abs_epi8(w);
        for (size_t m = 0; m < count; ++m) {
          const __m256i a = _mm256_sign_epi8(broadcast4(q + m * x->stride + k), w);
          const __m256i pairs = _mm256_maddubs_epi16(magnitude, a);
          sum[m][h] = _mm256_add_epi32(sum[m][h], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    tile += elm_tile_bytes(ELM_FORMAT_E8, cols);
    for (size_t m = 0; m < count; ++m) {
      const float d = x->d[(first_row + m) * x->num_superblocks + s];
      for (size_t h = 0; h < 2; ++h) {
        add_scaled(acc[m] + 8 * h, sum[m][h], tile - ELM_LINE, h, d);
      }
    }
  }
}

#include "kernels/matmul/rows_by_four.inl"
