#include <immintrin.h>

#include "kernels/kernels.h"
#include "kernels/tile.h"

static inline __m512i broadcast4(const void* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

/* vpdpbusd wants its first factor unsigned: weights are taken as c + 128, and 128 * bsum is taken
 * off by starting from it. */
static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t count) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  const __m512i flip = _mm512_set1_epi8(-128);
  __m512 acc[ELM_GEMV_MAX_ROWS];
  for (size_t m = 0; m < count; ++m) {
    acc[m] = _mm512_setzero_ps();
  }
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const int8_t* q = x->q + s * ELM_SUPERBLOCK;
    __m512i even[ELM_GEMV_MAX_ROWS], odd[ELM_GEMV_MAX_ROWS];
    for (size_t m = 0; m < count; ++m) {
      even[m] = _mm512_set1_epi32(-128 * x->bsum[m * x->num_superblocks + s]);
      odd[m] = _mm512_setzero_si512();
    }
    for (size_t l = 0; l < cols / 4; l += 2) {
      const uint8_t* line = tile + l * ELM_LINE;
      const __m512i w0 = _mm512_xor_si512(_mm512_load_si512(line), flip);
      const __m512i w1 = _mm512_xor_si512(_mm512_load_si512(line + ELM_LINE), flip);
      _mm_prefetch((const char*)(line + ELM_PREFETCH_BYTES), _MM_HINT_T0);
      _mm_prefetch((const char*)(line + ELM_PREFETCH_BYTES + ELM_LINE), _MM_HINT_T0);
      for (size_t m = 0; m < count; ++m) {
        const int8_t* a = q + m * x->stride + 4 * l;
        even[m] = _mm512_dpbusd_epi32(even[m], w0, broadcast4(a));
        odd[m] = _mm512_dpbusd_epi32(odd[m], w1, broadcast4(a + 4));
      }
    }
    tile += cols / 4 * ELM_LINE;
    const __m512 d = _mm512_load_ps((const float*)(const void*)tile);
    for (size_t m = 0; m < count; ++m) {
      const __m512 isum = _mm512_cvtepi32_ps(_mm512_add_epi32(even[m], odd[m]));
      const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x->d[m * x->num_superblocks + s]));
      acc[m] = _mm512_fmadd_ps(isum, scale, acc[m]);
    }
    tile += ELM_LINE;
  }
  for (size_t m = 0; m < count; ++m) {
    _mm512_storeu_ps(args->out + m * args->out_stride + panel * ELM_PANEL_ROWS, acc[m]);
  }
}

void elm_gemv_q8_e8__avx512vnni(const elm_matmul_args* args) {
  for (size_t panel = args->first_panel; panel < args->last_panel; ++panel) {
    switch (args->num_rows) {
      case 1: panel_times(args, panel, 1); break;
      case 2: panel_times(args, panel, 2); break;
      case 3: panel_times(args, panel, 3); break;
      case 4: panel_times(args, panel, 4); break;
      case 5: panel_times(args, panel, 5); break;
      case 6: panel_times(args, panel, 6); break;
      case 7: panel_times(args, panel, 7); break;
      default: panel_times(args, panel, 8); break;
    }
  }
}
