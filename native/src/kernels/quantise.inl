/* Floats to int8 with one scale: what activations, keys, values and probabilities share. */
#include "kernels/kernels.h"
#include "kernels/simd.h"

static inline float reduce_magnitude(f16v a) {
  float lanes[16];
  v_store(lanes, a);
  uint32_t largest = 0;
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    memcpy(&bits, &lanes[i], sizeof bits);
    largest = bits > largest ? bits : largest;
  }
  float result;
  memcpy(&result, &largest, sizeof result);
  return result;
}

/* q[i] = rint(x[i] * (127 / largest magnitude)), count a multiple of 16; returns the scale. A NaN
 * in x makes the scale NaN, which carries it on. */
static inline float quantise(const float* x, size_t count, int8_t* q) {
  f16v largest = v_set(0.0f);
  for (size_t i = 0; i < count; i += 16) {
    largest = v_max_magnitude(v_abs(v_load(x + i)), largest);
  }
  const float amax = reduce_magnitude(largest);
  const f16v inverse = v_set(amax > 0x1p-100f ? 127.0f / amax : 0.0f); /* finite: 0 stays 0 */
  for (size_t i = 0; i < count; i += 16) {
    const f16v scaled = v_mul(v_load(x + i), inverse);
    v_store_int8(q + i, v_max(v_min(scaled, v_set(127.0f)), v_set(-127.0f)));
  }
  return amax / 127.0f;
}
