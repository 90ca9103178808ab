#include "kernels/kernels.h"
#include "kernels/simd.h"

/* Where group g's sum lies: the order 0 2 1 3 4 6 5 7 is its own inverse. */
static const uint8_t gsum_place[8] = {0, 2, 1, 3, 4, 6, 5, 7};

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

void ELM_NAME(const elm_quant_args* args) {
  const elm_q8* out = args->out;
  int8_t* q = out->q + args->row * out->stride;
  for (size_t s = 0; s < out->num_superblocks; ++s) {
    const size_t first = s * ELM_SUPERBLOCK;
    const size_t left = out->num_cols - first;
    const size_t count = left < ELM_SUPERBLOCK ? left : ELM_SUPERBLOCK;
    float padded[ELM_SUPERBLOCK];
    const float* x = args->x + first;
    if (first + count > args->n) {
      const size_t present = args->n > first ? args->n - first : 0;
      memset(padded, 0, sizeof padded);
      memcpy(padded, x, present * sizeof(float));
      x = padded;
    }
    f16v largest = v_set(0.0f);
    for (size_t i = 0; i < count; i += 16) {
      largest = v_max_magnitude(v_abs(v_load(x + i)), largest);
    }
    const float amax = reduce_magnitude(largest); /* NaN if any input is: d carries it on */
    const f16v inverse = v_set(amax > 0x1p-100f ? 127.0f / amax : 0.0f); /* finite: 0 stays 0 */
    for (size_t i = 0; i < count; i += 16) {
      const f16v scaled = v_mul(v_load(x + i), inverse);
      v_store_int8(q + first + i, v_max(v_min(scaled, v_set(127.0f)), v_set(-127.0f)));
    }
    int16_t* gsum = out->gsum + (args->row * out->num_superblocks + s) * 8;
    int32_t total = 0;
    for (size_t g = 0; g < 8; ++g) {
      int32_t sum = 0;
      if (g * ELM_GROUP < count) {
        for (size_t i = 0; i < ELM_GROUP; ++i) {
          sum += q[first + g * ELM_GROUP + i];
        }
      }
      gsum[gsum_place[g]] = (int16_t)sum;
      total += sum;
    }
    out->bsum[args->row * out->num_superblocks + s] = total;
    out->d[args->row * out->num_superblocks + s] = amax / 127.0f;
  }
}
