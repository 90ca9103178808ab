/* The Hadamard transform in place, unscaled, over blocks of the largest power of two that divides n
 * (n is a multiple of 16): it spreads a channel that towers over the others, so that one int8 scale
 * serves a whole key. Applied to query and key it multiplies their product by the block's size. */
#include "kernels/kernels.h"
#include "kernels/simd.h"

static inline size_t hadamard_block(size_t n) { return n & (~n + 1); }

/* Lanes i and i ^ h become their sum (where the bit h of i is clear) and difference. */
static inline f16v butterfly(f16v x, int h) {
  static const float signs[4][16] = {
      {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
      {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
      {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
      {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
  };
  const f16v sign = v_load(signs[h == 1 ? 0 : h == 2 ? 1 : h == 4 ? 2 : 3]);
  return v_add(v_swap(x, h), v_mul(x, sign));
}

static inline void hadamard(float* x, size_t n) {
  const size_t block = hadamard_block(n);
  for (size_t i = 0; i < n; i += 16) {
    f16v v = v_load(x + i);
    v = butterfly(v, 1);
    v = butterfly(v, 2);
    v = butterfly(v, 4);
    v = butterfly(v, 8);
    v_store(x + i, v);
  }
  for (size_t half = 16; half < block; half *= 2) {
    for (size_t first = 0; first < n; first += 2 * half) {
      for (size_t i = first; i < first + half; i += 16) {
        const f16v a = v_load(x + i), b = v_load(x + i + half);
        v_store(x + i, v_add(a, b));
        v_store(x + i + half, v_add(a, v_mul(b, v_set(-1.0f))));
      }
    }
  }
}

/* The same, halved once for every second doubling of the block: about as large as it was. */
static inline void hadamard_halved(float* x, size_t n) {
  float scale = 1.0f;
  for (size_t block = hadamard_block(n); block >= 4; block /= 4) {
    scale *= 0.5f;
  }
  hadamard(x, n);
  for (size_t i = 0; i < n; i += 16) {
    v_store(x + i, v_mul(v_load(x + i), v_set(scale)));
  }
}
