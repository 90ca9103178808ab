#include <math.h>

#include "kernels/kernels.h"
#include "kernels/simd.h"

void ELM_NAME(const elm_rmsnorm_args* args) {
  const size_t whole = args->n / 16 * 16;
  const size_t rest = args->n - whole;
  float tail[16] = {0};
  memcpy(tail, args->x + whole, rest * sizeof(float));

  f16v squares = v_set(0.0f);
  for (size_t i = 0; i < whole; i += 16) {
    const f16v x = v_load(args->x + i);
    squares = v_fma(x, x, squares);
  }
  const f16v last = v_load(tail);
  squares = v_fma(last, last, squares); /* zeros past the end change nothing */

  const float mean = v_reduce_add(squares) / (float)args->n;
  const float scale = 1.0f / sqrtf(mean + args->eps);
  for (size_t i = 0; i < whole; i += 16) {
    const f16v scaled = v_mul(v_load(args->x + i), v_set(scale));
    v_store(args->y + i, v_mul(scaled, v_load(args->weight + i)));
  }
  for (size_t i = 0; i < rest; ++i) {
    args->y[whole + i] = (tail[i] * scale) * args->weight[whole + i];
  }
}
