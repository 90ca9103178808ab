#include <immintrin.h>

#include "kernels/matmul/avx2.h"
#include "kernels/tile.h"

enum { GEMM_ROWS = 4, GEMM_CHUNK = 128 };

/* A tile as the product reads it: codes as bytes, line k/4 being 16 rows x 4 k; s of group g in
 * both 16-bit halves of a row's word. It stays in the first-level cache while a chunk of rows
 * passes. */
typedef struct expanded_tile {
  _Alignas(64) uint8_t codes[ELM_SUPERBLOCK / 4 * ELM_LINE];
  _Alignas(64) uint8_t scale[ELM_SUPERBLOCK / ELM_GROUP * ELM_LINE];
} expanded_tile;

static inline void store_half_line(uint8_t* line, size_t half, __m256i value) {
  _mm256_store_si256((__m256i*)(void*)(line + 32 * half), value);
}

static inline void expand_tile(const uint8_t* tile, size_t cols, expanded_tile* out) {
  const __m256i nibble = _mm256_set1_epi8(15);
  for (size_t l = 0; l < cols / 8; ++l) {
    for (size_t h = 0; h < 2; ++h) {
      const __m256i codes = load_half_line(tile + l * ELM_LINE, h);
      uint8_t* to = out->codes + 2 * l * ELM_LINE;
      store_half_line(to, h, _mm256_and_si256(codes, nibble));
      store_half_line(to + ELM_LINE, h, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble));
    }
  }
  for (size_t h = 0; h < 2; ++h) {
    __m256i word = load_half_line(tile + cols / 8 * ELM_LINE, h);
    for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
      store_half_line(out->scale + g * ELM_LINE, h, low_nibble_pairs(word));
      word = _mm256_srli_epi32(word, 4);
    }
  }
}

/* acc (count, 2 halves) += superblock s of `count` rows (a constant). A group's codes times
 * activations are added up in 16 bits (8 * 2 * 15 * 127 < 32,768), then multiplied by s while they
 * widen. */
static inline __attribute__((always_inline)) void block_times(const elm_q8* x,
                                                              const expanded_tile* tile,
                                                              const uint8_t* scales, size_t s,
                                                              size_t first_row, size_t count,
                                                              __m256 (*acc)[2]) {
  const size_t cols = elm_superblock_cols(x->num_cols, s);
  const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
  __m256i sum[GEMM_ROWS][2];
  for (size_t m = 0; m < count; ++m) {
    sum[m][0] = sum[m][1] = _mm256_setzero_si256();
  }
  for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
    __m256i dot[GEMM_ROWS][2];
    for (size_t m = 0; m < count; ++m) {
      dot[m][0] = dot[m][1] = _mm256_setzero_si256();
    }
    for (size_t k = g * ELM_GROUP; k < (g + 1) * ELM_GROUP; k += 8) {
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
      const __m256i scale = load_half_line(tile->scale + g * ELM_LINE, h);
      for (size_t m = 0; m < count; ++m) {
        sum[m][h] = _mm256_add_epi32(sum[m][h], _mm256_madd_epi16(dot[m][h], scale));
      }
    }
  }
  for (size_t m = 0; m < count; ++m) {
    const size_t block = (first_row + m) * x->num_superblocks + s;
    for (size_t h = 0; h < 2; ++h) {
      const __m256i zero = zero_times(scales, h, x->gsum + 8 * block);
      acc[m][h] = add_scaled(acc[m][h], _mm256_sub_epi32(sum[m][h], zero), scales + 3 * ELM_LINE, h,
                             x->d[block]);
    }
  }
}

/* Rows [first_row, first_row + num_rows), at most GEMM_CHUNK, of one panel. */
static void chunk_times(const elm_matmul_args* args, size_t panel, size_t first_row,
                        size_t num_rows) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  expanded_tile expanded;
  __m256 acc[GEMM_CHUNK][2];
  for (size_t m = 0; m < num_rows; ++m) {
    acc[m][0] = acc[m][1] = _mm256_setzero_ps();
  }
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + cols / 8 * ELM_LINE;
    expand_tile(tile, cols, &expanded);
    tile += elm_e4_tile_bytes(cols);
    /* the next tile comes from memory while this one is multiplied */
    for (size_t i = 0; i < elm_e4_tile_bytes(ELM_SUPERBLOCK); i += ELM_LINE) {
      _mm_prefetch((const char*)(tile + i), _MM_HINT_T1);
    }
    size_t m = 0;
    for (; m + GEMM_ROWS <= num_rows; m += GEMM_ROWS) {
      block_times(x, &expanded, scales, s, first_row + m, GEMM_ROWS, acc + m);
    }
    switch (num_rows - m) {
      case 3:
        block_times(x, &expanded, scales, s, first_row + m, 3, acc + m);
        break;
      case 2:
        block_times(x, &expanded, scales, s, first_row + m, 2, acc + m);
        break;
      case 1:
        block_times(x, &expanded, scales, s, first_row + m, 1, acc + m);
        break;
      default:
        break;
    }
  }
  for (size_t m = 0; m < num_rows; ++m) {
    store_panel(args, panel, first_row + m, acc[m]);
  }
}

void elm_gemm_q8_e4__avx2(const elm_matmul_args* args) {
  for (size_t row = 0; row < args->num_rows; row += GEMM_CHUNK) {
    const size_t left = args->num_rows - row;
    for (size_t panel = args->first_panel; panel < args->last_panel; ++panel) {
      chunk_times(args, panel, row, left < GEMM_CHUNK ? left : GEMM_CHUNK);
    }
  }
}
