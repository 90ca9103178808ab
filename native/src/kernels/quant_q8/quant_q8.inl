#include "kernels/hadamard.inl"
#include "kernels/quantise.inl"

/* Where group g's sum lies: the order 0 2 1 3 4 6 5 7 is its own inverse. */
static const uint8_t gsum_place[8] = {0, 2, 1, 3, 4, 6, 5, 7};

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
    if (args->has_hadamard) {
      if (x != padded) {
        memcpy(padded, x, count * sizeof(float));
      }
      hadamard_halved(padded, count);
      x = padded;
    }
    const float d = quantise(x, count, q + first);
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
    out->d[args->row * out->num_superblocks + s] = d;
  }
}
