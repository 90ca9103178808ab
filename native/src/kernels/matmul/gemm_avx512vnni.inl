/* The int8 panel product for AVX-512 VNNI. The including file defines expand_tile(tile, cols, out):
 * it writes the tile's weights + 128 as cols/4 lines of 16 rows x 4 k and returns D's line; and
 * ELM_TILE_BYTES. A superblock of two panels (8 KiB of weights) stays in the first-level cache
 * while all rows of activations pass by; the rows' float sums wait in `out`. */
#include <immintrin.h>

#include "kernels/kernels.h"
#include "kernels/tile.h"

enum { GEMM_ROWS = 12, GEMM_PANELS = 2 };

static inline __m512i broadcast4(const void* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

/* num_panels x count accumulators (both constants), one superblock. */
static inline __attribute__((always_inline)) void block_times(
    const elm_matmul_args* args, const uint8_t* weights, const float* const* d, size_t s,
    size_t cols, size_t panel, size_t num_panels, size_t first_row, size_t count) {
  const elm_q8* x = args->x;
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
      float* out = args->out + (first_row + m) * args->out_stride + (panel + p) * ELM_PANEL_ROWS;
      const __m512 scale =
          _mm512_mul_ps(weight_d, _mm512_set1_ps(row_d[m * x->num_superblocks]));
      const __m512 before = s == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out);
      _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[p][m]), scale, before));
    }
  }
}

static inline __attribute__((always_inline)) void panels_times(const elm_matmul_args* args,
                                                               size_t panel, size_t num_panels) {
  const elm_q8* x = args->x;
  const uint8_t* tile[GEMM_PANELS];
  _Alignas(64) uint8_t weights[GEMM_PANELS * ELM_PANEL_ROWS * ELM_SUPERBLOCK];
  for (size_t p = 0; p < num_panels; ++p) {
    tile[p] = args->weights + (panel + p) * args->panel_bytes;
  }
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const float* d[GEMM_PANELS];
    for (size_t p = 0; p < num_panels; ++p) {
      d[p] = expand_tile(tile[p], cols, weights + p * ELM_PANEL_ROWS * ELM_SUPERBLOCK);
      tile[p] += ELM_TILE_BYTES(cols);
    }
    size_t row = 0;
    for (; row + GEMM_ROWS <= args->num_rows; row += GEMM_ROWS) {
      block_times(args, weights, d, s, cols, panel, num_panels, row, GEMM_ROWS);
    }
    switch (args->num_rows - row) {
#define ELM_REST(n) \
  case n: block_times(args, weights, d, s, cols, panel, num_panels, row, n); break;
      ELM_REST(1) ELM_REST(2) ELM_REST(3) ELM_REST(4) ELM_REST(5) ELM_REST(6)
      ELM_REST(7) ELM_REST(8) ELM_REST(9) ELM_REST(10) ELM_REST(11)
#undef ELM_REST
      default: break;
    }
  }
}

static void gemm(const elm_matmul_args* args) {
  size_t panel = args->first_panel;
  for (; panel + 2 <= args->last_panel; panel += 2) {
    panels_times(args, panel, 2);
  }
  if (panel < args->last_panel) {
    panels_times(args, panel, 1);
  }
}
