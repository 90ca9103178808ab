/* The merge of attention/softmax.inl over parts that lie in memory: the factors of 16 blocks go
 * through one exp, then each element of the result runs through these blocks. */
#include "kernels/kernels.h"
#include "kernels/simd.h"

enum { BATCH = 16 };

void ELM_NAME(const elm_attention_merge_args* args) {
  const size_t n = args->n, stride = elm_attention_part_floats(n);
  float max = args->parts[n], sum = args->parts[n + 1];
  memcpy(args->out, args->parts, n * sizeof(float));
  for (size_t first = 1; first < args->num_parts; first += BATCH) {
    const float* parts = args->parts + first * stride;
    const size_t left = args->num_parts - first;
    const size_t count = left < BATCH ? left : BATCH;
    float old_factors[BATCH] = {0}, new_factors[BATCH] = {0};
    for (size_t b = 0; b < count; ++b) {
      const float part_max = parts[b * stride + n];
      const float top = part_max > max ? part_max : max;
      old_factors[b] = max - top;
      new_factors[b] = part_max - top;
      max = top;
    }
    v_store(old_factors, v_exp(v_load(old_factors)));
    v_store(new_factors, v_exp(v_load(new_factors)));
    for (size_t b = 0; b < count; ++b) {
      sum = fmaf(sum, old_factors[b], parts[b * stride + n + 1] * new_factors[b]);
    }
    for (size_t i = 0; i < n; i += 16) {
      f16v out = v_load(args->out + i);
      for (size_t b = 0; b < count; ++b) {
        const f16v scaled = v_mul(v_load(parts + b * stride + i), v_set(new_factors[b]));
        out = v_fma(out, v_set(old_factors[b]), scaled);
      }
      v_store(args->out + i, out);
    }
  }
  const f16v inverse = v_set(1.0f / sum);
  for (size_t i = 0; i < n; i += 16) {
    v_store(args->out + i, v_mul(v_load(args->out + i), inverse));
  }
}
