/* Products of few rows with E4 and E5 weights for AVX-512 VNNI; the including file defines
 * ELM_FORMAT. */
#include "kernels/kernels.h"
#include "kernels/matmul/grouped_avx512.h"

static inline __m512i broadcast4(const void* p) {
  int32_t word;
  memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

/* One panel times `count` rows (a constant): each line of weights is loaded once. The codes' dot
 * products per group are multiplied by s, and sum_g z * gsum is taken off at the end. */
static inline __attribute__((always_inline)) void panel_times(const elm_matmul_args* args,
                                                              size_t panel, size_t count) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  const __m512i low_byte = _mm512_set1_epi16(0xFF);
  __m512 acc[ELM_GEMV_MAX_ROWS];
  for (size_t m = 0; m < count; ++m) {
    acc[m] = _mm512_setzero_ps();
  }
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + elm_code_bytes(ELM_FORMAT, cols);
    const int8_t* q = x->q + s * ELM_SUPERBLOCK;
    __m512i word = _mm512_load_si512(scales);
    __m512i sum[ELM_GEMV_MAX_ROWS];
    for (size_t m = 0; m < count; ++m) {
      sum[m] = _mm512_setzero_si512();
    }
    for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
      __m512i dot[ELM_GEMV_MAX_ROWS];
      for (size_t m = 0; m < count; ++m) {
        dot[m] = _mm512_setzero_si512();
      }
      const uint8_t* group = tile + g * elm_group_bytes(ELM_FORMAT);
      __m512i fifth = load_fifth(ELM_FORMAT, group);
      for (size_t ahead = 0; ahead < elm_group_bytes(ELM_FORMAT); ahead += ELM_LINE) {
        _mm_prefetch((const char*)(group + ELM_PREFETCH_BYTES + ahead), _MM_HINT_T0);
      }
      for (size_t l = 0; l < 4; ++l) {
        __m512i low, high;
        unpack_line(ELM_FORMAT, group + l * ELM_LINE, &fifth, &low, &high);
        for (size_t m = 0; m < count; ++m) {
          const int8_t* a = q + m * x->stride + g * ELM_GROUP + 8 * l;
          dot[m] = _mm512_dpbusd_epi32(dot[m], low, broadcast4(a));
          dot[m] = _mm512_dpbusd_epi32(dot[m], high, broadcast4(a + 4));
        }
      }
      const __m512i scale = _mm512_and_si512(word, _mm512_set1_epi32(15));
      word = _mm512_srli_epi32(word, 4);
      for (size_t m = 0; m < count; ++m) {
        sum[m] = _mm512_add_epi32(sum[m], _mm512_mullo_epi32(dot[m], scale));
      }
    }
    const __m512i z0 = _mm512_load_si512(scales + ELM_LINE);
    const __m512i z1 = _mm512_load_si512(scales + 2 * ELM_LINE);
    const __m512 d = _mm512_load_ps((const float*)(const void*)(scales + 3 * ELM_LINE));
    for (size_t m = 0; m < count; ++m) {
      const int16_t* gsum = x->gsum + (m * x->num_superblocks + s) * 8;
      __m512i zero = _mm512_setzero_si512();
      zero = _mm512_dpwssd_epi32(zero, _mm512_and_si512(z0, low_byte), broadcast4(gsum));
      zero = _mm512_dpwssd_epi32(zero, _mm512_srli_epi16(z0, 8), broadcast4(gsum + 2));
      zero = _mm512_dpwssd_epi32(zero, _mm512_and_si512(z1, low_byte), broadcast4(gsum + 4));
      zero = _mm512_dpwssd_epi32(zero, _mm512_srli_epi16(z1, 8), broadcast4(gsum + 6));
      const __m512 isum = _mm512_cvtepi32_ps(_mm512_sub_epi32(sum[m], zero));
      const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x->d[m * x->num_superblocks + s]));
      acc[m] = _mm512_fmadd_ps(isum, scale, acc[m]);
    }
    tile = scales + 4 * ELM_LINE;
  }
  for (size_t m = 0; m < count; ++m) {
    _mm512_storeu_ps(args->out + m * args->out_stride + panel * ELM_PANEL_ROWS, acc[m]);
  }
}

/* The same for many rows: weights + 128 are made in registers, once for all of them. */
static inline __attribute__((always_inline)) void panel_times_many(const elm_matmul_args* args,
                                                                   size_t panel, size_t count) {
  const elm_q8* x = args->x;
  const uint8_t* tile = args->weights + panel * args->panel_bytes;
  __m512 acc[ELM_GEMV_MAX_ROWS];
  for (size_t m = 0; m < count; ++m) {
    acc[m] = _mm512_setzero_ps();
  }
  for (size_t s = 0; s < x->num_superblocks; ++s) {
    const size_t cols = elm_superblock_cols(x->num_cols, s);
    const uint8_t* scales = tile + elm_code_bytes(ELM_FORMAT, cols);
    const int8_t* q = x->q + s * ELM_SUPERBLOCK;
    __m512i sum[ELM_GEMV_MAX_ROWS];
    for (size_t m = 0; m < count; ++m) {
      sum[m] = _mm512_set1_epi32(-128 * x->bsum[m * x->num_superblocks + s]);
    }
    for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
      const group_scales group = load_group(scales, g, -128);
      const uint8_t* codes = tile + g * elm_group_bytes(ELM_FORMAT);
      __m512i fifth = load_fifth(ELM_FORMAT, codes);
      for (size_t ahead = 0; ahead < elm_group_bytes(ELM_FORMAT); ahead += ELM_LINE) {
        _mm_prefetch((const char*)(codes + ELM_PREFETCH_BYTES + ahead), _MM_HINT_T0);
      }
      for (size_t l = 0; l < 4; ++l) {
        __m512i low, high;
        unpack_line(ELM_FORMAT, codes + l * ELM_LINE, &fifth, &low, &high);
        low = weights_of_codes(low, group);
        high = weights_of_codes(high, group);
        for (size_t m = 0; m < count; ++m) {
          const int8_t* a = q + m * x->stride + g * ELM_GROUP + 8 * l;
          sum[m] = _mm512_dpbusd_epi32(sum[m], low, broadcast4(a));
          sum[m] = _mm512_dpbusd_epi32(sum[m], high, broadcast4(a + 4));
        }
      }
    }
    const __m512 d = _mm512_load_ps((const float*)(const void*)(scales + 3 * ELM_LINE));
    for (size_t m = 0; m < count; ++m) {
      const __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(x->d[m * x->num_superblocks + s]));
      acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[m]), scale, acc[m]);
    }
    tile = scales + 4 * ELM_LINE;
  }
  for (size_t m = 0; m < count; ++m) {
    _mm512_storeu_ps(args->out + m * args->out_stride + panel * ELM_PANEL_ROWS, acc[m]);
  }
}

static void matmul(const elm_matmul_args* args) {
  for (size_t panel = args->first_panel; panel < args->last_panel; ++panel) {
    switch (args->num_rows) {
      case 1: panel_times(args, panel, 1); break;
      case 2: panel_times(args, panel, 2); break;
      case 3: panel_times(args, panel, 3); break;
      case 4: panel_times(args, panel, 4); break;
      case 5: panel_times_many(args, panel, 5); break;
      case 6: panel_times_many(args, panel, 6); break;
      case 7: panel_times_many(args, panel, 7); break;
      default: panel_times_many(args, panel, 8); break;
    }
  }
}
