/* The int8 panel product for AMX. The including file defines weights_of(tile, cols, buffer): the
 * tile's weights as cols/4 lines of 16 rows x 4 k, in `buffer` if it has to make them; and
 * ELM_FORMAT. Lines lie as tiles read them, and signed times signed needs no correction.
 *
 * A block is two tiles of activation rows times two panels: four sums of 16 x 16 over a superblock.
 * The weights of two panels (8 KiB), the float sums of a chunk of rows (16 KiB) and the sums of two
 * blocks (8 KiB) stay in the first-level cache, the activations of a chunk in the second. By the
 * instructions' throughput the tiles of a full block take 256 cycles and its float sums some 150,
 * which the processor does meanwhile: they come after the next block's tiles in the program. */
#include <immintrin.h>

#include "base/amx.h"
#include "kernels/kernels.h"
#include "kernels/tile.h"

enum { GEMM_PANELS = 2, GEMM_CHUNK = 128, TILE_ROWS = 16, TILE_BYTES = 64 };

/* The rows of a chunk in tiles of one height, so that one configuration serves them all: the last
 * tile ends with the last row and may begin inside the one before. */
typedef struct chunk {
  size_t first_row;
  size_t num_rows;
  size_t num_tiles;
  size_t tile_rows;
  size_t tile_cols; /* 64, or 32 for activations of an odd number of groups */
} chunk;

/* The sums of a superblock for up to two tiles of activation rows. */
typedef struct block_sums {
  _Alignas(64) int32_t of[2][GEMM_PANELS][TILE_ROWS * ELM_PANEL_ROWS];
} block_sums;

typedef struct block {
  const block_sums* sums;
  size_t s;
  size_t first_tile;
  const uint8_t* d[GEMM_PANELS];
} block;

static inline size_t first_row_of(const chunk* c, size_t tile) {
  const size_t row = tile * c->tile_rows, last = c->num_rows - c->tile_rows;
  return row < last ? row : last;
}

/* num_tiles and num_panels are constants. */
static inline __attribute__((always_inline)) void multiply(const int8_t* const* a, size_t stride,
                                                           size_t num_tiles,
                                                           const uint8_t* const* weights,
                                                           size_t num_panels, size_t cols,
                                                           size_t step, block_sums* sums) {
  ELM_TILE_ZERO(0);
  ELM_TILE_ZERO(1);
  ELM_TILE_ZERO(2);
  ELM_TILE_ZERO(3);
  for (size_t k = 0; k < cols; k += step) {
    ELM_TILE_LOAD(4, a[0] + k, stride);
    ELM_TILE_LOAD(6, weights[0] + k / 4 * ELM_LINE, ELM_LINE);
    ELM_TILE_DOT(0, 4, 6);
    if (num_panels == 2) {
      ELM_TILE_LOAD(7, weights[1] + k / 4 * ELM_LINE, ELM_LINE);
      ELM_TILE_DOT(1, 4, 7);
    }
    if (num_tiles == 2) {
      ELM_TILE_LOAD(5, a[1] + k, stride);
      ELM_TILE_DOT(2, 5, 6);
      if (num_panels == 2) {
        ELM_TILE_DOT(3, 5, 7);
      }
    }
  }
  ELM_TILE_STORE(0, sums->of[0][0], ELM_LINE);
  if (num_panels == 2) {
    ELM_TILE_STORE(1, sums->of[0][1], ELM_LINE);
  }
  if (num_tiles == 2) {
    ELM_TILE_STORE(2, sums->of[1][0], ELM_LINE);
    if (num_panels == 2) {
      ELM_TILE_STORE(3, sums->of[1][1], ELM_LINE);
    }
  }
}

/* acc (rows of the chunk, num_panels) += a block's part; num_panels is a constant. */
static inline __attribute__((always_inline)) void add_scaled(const elm_q8* x, const chunk* c,
                                                             const block* b, size_t num_panels,
                                                             __m512 (*acc)[GEMM_PANELS]) {
  __m512 weight_d[GEMM_PANELS];
  for (size_t p = 0; p < num_panels; ++p) {
    weight_d[p] = _mm512_load_ps(b->d[p]);
  }
  for (size_t t = 0; t < 2 && b->first_tile + t < c->num_tiles; ++t) {
    const size_t first = first_row_of(c, b->first_tile + t);
    for (size_t m = (b->first_tile + t) * c->tile_rows; m < first + c->tile_rows; ++m) {
      const float d = x->d[(c->first_row + m) * x->num_superblocks + b->s];
      for (size_t p = 0; p < num_panels; ++p) {
        const __m512i sum = _mm512_load_si512(b->sums->of[t][p] + (m - first) * ELM_PANEL_ROWS);
        const __m512 scale = _mm512_mul_ps(weight_d[p], _mm512_set1_ps(d));
        acc[m][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[m][p]);
      }
    }
  }
}

/* One chunk of num_panels (a constant) panels; the tiles are configured. */
static inline __attribute__((always_inline)) void chunk_times(const elm_matmul_args* args,
                                                              size_t panel, size_t num_panels,
                                                              const chunk* c) {
  const elm_q8* x = args->x;
  const uint8_t* tile[GEMM_PANELS];
  _Alignas(64) uint8_t buffer[GEMM_PANELS][ELM_PANEL_ROWS * ELM_SUPERBLOCK];
  block_sums sums[2];
  __m512 acc[GEMM_CHUNK][GEMM_PANELS];
  for (size_t p = 0; p < num_panels; ++p) {
    tile[p] = args->weights + (panel + p) * args->panel_bytes;
    for (size_t m = 0; m < c->num_rows; ++m) {
      acc[m][p] = _mm512_setzero_ps();
    }
  }
  block done = {0};
  size_t num_blocks = 0;
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* weights[GEMM_PANELS];
    block next = {.s = s};
    for (size_t p = 0; p < num_panels; ++p) {
      weights[p] = weights_of(tile[p], cols, buffer[p]);
      tile[p] += elm_tile_bytes(ELM_FORMAT, cols);
      next.d[p] = tile[p] - ELM_LINE;
    }
    /* the next tiles come from memory while these are multiplied */
    const bool is_last = s + 1 == x->num_superblocks;
    const size_t ahead = is_last ? (num_panels - 1) * args->panel_bytes : 0;
    for (size_t p = 0; p < num_panels; ++p) {
      for (size_t i = 0; i < elm_tile_bytes(ELM_FORMAT, ELM_SUPERBLOCK); i += ELM_LINE) {
        _mm_prefetch((const char*)(tile[p] + ahead + i), _MM_HINT_T1);
      }
    }
    const int8_t* q = x->q + c->first_row * x->stride + s * ELM_SUPERBLOCK;
    for (size_t t = 0; t < c->num_tiles; t += 2, ++num_blocks) {
      const bool is_pair = t + 1 < c->num_tiles;
      const int8_t* a[2] = {q + first_row_of(c, t) * x->stride,
                            is_pair ? q + first_row_of(c, t + 1) * x->stride : NULL};
      if (is_pair) {
        multiply(a, x->stride, 2, weights, num_panels, cols, c->tile_cols, &sums[num_blocks % 2]);
      } else {
        multiply(a, x->stride, 1, weights, num_panels, cols, c->tile_cols, &sums[num_blocks % 2]);
      }
      if (num_blocks > 0) {
        add_scaled(x, c, &done, num_panels, acc);
      }
      next.sums = &sums[num_blocks % 2];
      next.first_tile = t;
      done = next;
    }
  }
  if (num_blocks > 0) {
    add_scaled(x, c, &done, num_panels, acc);
  }
  for (size_t m = 0; m < c->num_rows; ++m) {
    float* out = args->out + (c->first_row + m) * args->out_stride + panel * ELM_PANEL_ROWS;
    for (size_t p = 0; p < num_panels; ++p) {
      _mm512_storeu_ps(out + p * ELM_PANEL_ROWS, acc[m][p]);
    }
  }
}

/* Tiles 0..3 are sums, 4 and 5 activations, 6 and 7 weights. */
static void configure(const chunk* c) {
  elm_tile_config config = {.palette = 1};
  for (size_t i = 0; i < 8; ++i) {
    const bool is_weights = i >= 6, is_sum = i < 4;
    config.num_rows[i] = (uint8_t)(is_weights ? c->tile_cols / 4 : c->tile_rows);
    config.row_bytes[i] = (uint16_t)(is_weights || is_sum ? TILE_BYTES : c->tile_cols);
  }
  ELM_TILE_CONFIGURE(&config);
}

static void gemm(const elm_matmul_args* args) {
  const size_t num_chunks = (args->num_rows + GEMM_CHUNK - 1) / GEMM_CHUNK;
  for (size_t i = 0; i < num_chunks; ++i) {
    const size_t first = args->num_rows * i / num_chunks;
    const size_t num_rows = args->num_rows * (i + 1) / num_chunks - first;
    const size_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const chunk c = {.first_row = first,
                     .num_rows = num_rows,
                     .num_tiles = num_tiles,
                     .tile_rows = (num_rows + num_tiles - 1) / num_tiles,
                     .tile_cols = args->x->num_cols % 64 == 0 ? 64 : 32};
    configure(&c);
    size_t panel = args->first_panel;
    for (; panel + GEMM_PANELS <= args->last_panel; panel += GEMM_PANELS) {
      chunk_times(args, panel, GEMM_PANELS, &c);
    }
    if (panel < args->last_panel) {
      chunk_times(args, panel, 1, &c);
    }
  }
  ELM_TILE_RELEASE();
}
