#include "kernels/kernels.h"
#include "kernels/simd.h"

void ELM_NAME(const elm_rope_args* args) {
  const size_t half = args->n / 2;
  const f16v scale = v_set(args->scale);
  for (size_t i = 0; i < half; i += 16) {
    float x0[16] = {0}, x1[16] = {0}, cosine[16] = {0}, sine[16] = {0};
    const size_t count = half - i < 16 ? half - i : 16;
    memcpy(x0, args->x + i, count * sizeof(float));
    memcpy(x1, args->x + half + i, count * sizeof(float));
    memcpy(cosine, args->cos + i, count * sizeof(float));
    memcpy(sine, args->sin + i, count * sizeof(float));
    const f16v a = v_load(x0), b = v_load(x1), c = v_load(cosine), s = v_load(sine);
    const f16v y0 = v_fma(a, c, v_mul(v_mul(b, s), v_set(-1.0f)));
    const f16v y1 = v_fma(b, c, v_mul(a, s));
    v_store(x0, v_mul(y0, scale));
    v_store(x1, v_mul(y1, scale));
    memcpy(args->x + i, x0, count * sizeof(float));
    memcpy(args->x + half + i, x1, count * sizeof(float));
  }
}
