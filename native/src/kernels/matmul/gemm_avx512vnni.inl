/* The int8 panel product for AVX-512 VNNI. The including file defines expand_tile(tile, cols, out):
 * it writes the tile's weights + 128 as cols/4 lines of 16 rows x 4 k; and ELM_FORMAT. A superblock
 * of two panels (8 KiB of weights) stays in the first-level cache while a chunk of activation rows
 * passes by, whose float sums wait in 16 KiB beside it: in `out` they would lie on a page each. */
#include <immintrin.h>

#include "kernels/kernels.h"
#include "kernels/tile.h"

/* 2 x 8 accumulators: GCC 12 keeps them in registers, 2 x 12 it does not. */
enum { GEMM_ROWS = 8, GEMM_PANELS = 2, GEMM_CHUNK = 128 };

static inline __m512i broadcast4(const void* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

/* acc (count, num_panels) += one superblock's part; num_panels and count are constants. */
static inline __attribute__((always_inline)) void block_times(
    const elm_q8* x, const uint8_t* weights, const float* const* d, size_t s, size_t num_panels,
    size_t first_row, size_t count, __m512 (*acc)[GEMM_PANELS]) {
  const size_t cols = elm_superblock_cols(x->num_cols, s);
  const int8_t* q = x->q + first_row * x->stride + s * ELM_SUPERBLOCK;
  const int32_t* bsum = x->bsum + first_row * x->num_superblocks + s;
  const float* row_d = x->d + first_row * x->num_superblocks + s;
  __m512i sum[GEMM_PANELS][GEMM_ROWS];
  for (size_t m = 0; m < count; ++m) {
    for (size_t p = 0; p < num_panels; ++p) {
      sum[p][m] = _mm512_set1_epi32(-128 * bsum[m * x->num_superblocks]);
    }
  }
  for (size_t k = 0; k < cols; k += 4) {
    __m512i w[GEMM_PANELS];
    for (size_t p = 0; p < num_panels; ++p) {
      w[p] = _mm512_load_si512(weights + p * ELM_PANEL_ROWS * ELM_SUPERBLOCK + k / 4 * ELM_LINE);
    }
    for (size_t m = 0; m < count; ++m) {
      const __m512i a = broadcast4(q + m * x->stride + k);
      for (size_t p = 0; p < num_panels; ++p) {
        sum[p][m] = _mm512_dpbusd_epi32(sum[p][m], w[p], a);
      }
    }
  }
  for (size_t p = 0; p < num_panels; ++p) {
    const __m512 weight_d = _mm512_load_ps(d[p]);
    for (size_t m = 0; m < count; ++m) {
      const __m512 scale = _mm512_mul_ps(weight_d, _mm512_set1_ps(row_d[m * x->num_superblocks]));
      acc[m][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p][m]), scale, acc[m][p]);
    }
  }
}

/* Rows [first_row, first_row + num_rows), at most GEMM_CHUNK, of num_panels (a constant) panels. */
static inline __attribute__((always_inline)) void chunk_times(const elm_matmul_args* args,
                                                              size_t panel, size_t num_panels,
                                                              size_t first_row, size_t num_rows) {
  const elm_q8* x = args->x;
  const uint8_t* tile[GEMM_PANELS];
  _Alignas(64) uint8_t weights[GEMM_PANELS * ELM_PANEL_ROWS * ELM_SUPERBLOCK];
  __m512 acc[GEMM_CHUNK][GEMM_PANELS];
  for (size_t p = 0; p < num_panels; ++p) {
    tile[p] = args->weights + (panel + p) * args->panel_bytes;
    for (size_t m = 0; m < num_rows; ++m) {
      acc[m][p] = _mm512_setzero_ps();
    }
  }
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const float* d[GEMM_PANELS];
    for (size_t p = 0; p < num_panels; ++p) {
      expand_tile(tile[p], cols, weights + p * ELM_PANEL_ROWS * ELM_SUPERBLOCK);
      tile[p] += elm_tile_bytes(ELM_FORMAT, cols);
      d[p] = (const float*)(const void*)(tile[p] - ELM_LINE);
    }
    /* the next tiles come from memory while these are multiplied */
    const bool is_last = s + 1 == x->num_superblocks;
    const size_t ahead = is_last ? (num_panels - 1) * args->panel_bytes : 0;
    for (size_t p = 0; p < num_panels; ++p) {
      for (size_t i = 0; i < elm_tile_bytes(ELM_FORMAT, ELM_SUPERBLOCK); i += ELM_LINE) {
        _mm_prefetch((const char*)(tile[p] + ahead + i), _MM_HINT_T1);
      }
    }
    size_t m = 0;
    for (; m + GEMM_ROWS <= num_rows; m += GEMM_ROWS) {
      block_times(x, weights, d, s, num_panels, first_row + m, GEMM_ROWS, acc + m);
    }
    switch (num_rows - m) {
#define ELM_REST(n) \
  case n: block_times(x, weights, d, s, num_panels, first_row + m, n, acc + m); break
      ELM_REST(1);
      ELM_REST(2);
      ELM_REST(3);
      ELM_REST(4);
      ELM_REST(5);
      ELM_REST(6);
      ELM_REST(7);
#undef ELM_REST
      default: break;
    }
  }
  for (size_t m = 0; m < num_rows; ++m) {
    float* out = args->out + (first_row + m) * args->out_stride + panel * ELM_PANEL_ROWS;
    for (size_t p = 0; p < num_panels; ++p) {
      _mm512_storeu_ps(out + p * ELM_PANEL_ROWS, acc[m][p]);
    }
  }
}

static void gemm(const elm_matmul_args* args) {
  for (size_t row = 0; row < args->num_rows; row += GEMM_CHUNK) {
    const size_t left = args->num_rows - row;
    const size_t num_rows = left < GEMM_CHUNK ? left : GEMM_CHUNK;
    size_t panel = args->first_panel;
    for (; panel + GEMM_PANELS <= args->last_panel; panel += GEMM_PANELS) {
      chunk_times(args, panel, GEMM_PANELS, row, num_rows);
    }
    if (panel < args->last_panel) {
      chunk_times(args, panel, 1, row, num_rows);
    }
  }
}
