#include "kernels/matmul/neon_dotprod.h"

typedef struct expanded_tile {
  uint8_t weights[ELM_SUPERBLOCK / 4 * ELM_LINE]; /* int8: line k/4 is 16 rows x 4 k */
} expanded_tile;

/* The lowest byte of every word in all four of its bytes. */
static inline uint8x16_t four_times(uint32x4_t word) {
  return vreinterpretq_u8_u32(vmulq_n_u32(word, UINT32_C(0x01010101)));
}

static inline void expand_tile(const uint8_t* tile, size_t cols, expanded_tile* out) {
  const uint8_t* scales = tile + cols / 8 * ELM_LINE;
  const uint8x16_t nibble = vdupq_n_u8(15);
  for (size_t g = 0; g < cols / ELM_GROUP; ++g) {
    const int32x4_t right = vdupq_n_s32(-8 * (int32_t)(g % 4));
    for (size_t v = 0; v < 4; ++v) {
      const uint8x16_t scale = four_times(group_scale(load_quarter(scales, v), g));
      const uint8x16_t bytes = load_quarter(scales + (1 + g / 4) * ELM_LINE, v);
      const uint32x4_t shifted = vshlq_u32(vreinterpretq_u32_u8(bytes), right);
      const uint8x16_t zero = four_times(vandq_u32(shifted, vdupq_n_u32(0xFF)));
      for (size_t l = 4 * g; l < 4 * g + 4; ++l) {
        const uint8x16_t codes = load_quarter(tile + l * ELM_LINE, v);
        uint8_t* to = out->weights + 2 * l * ELM_LINE + 16 * v;
        vst1q_u8(to, vsubq_u8(vmulq_u8(vandq_u8(codes, nibble), scale), zero));
        vst1q_u8(to + ELM_LINE, vsubq_u8(vmulq_u8(vshrq_n_u8(codes, 4), scale), zero));
      }
    }
  }
}

static inline __attribute__((always_inline)) void block_times(const elm_q8* x,
                                                              const expanded_tile* tile,
                                                              const uint8_t* scales, size_t s,
                                                              size_t first_row, size_t count,
                                                              float (*acc)[ELM_PANEL_ROWS]) {
  int8_times(x, tile->weights, scales + 3 * ELM_LINE, s, first_row, count, acc);
}

#include "kernels/matmul/gemm_e4_chunks.inl"

void elm_gemm_q8_e4__neon_dotprod(const elm_matmul_args* args) { gemm(args); }
