#include "kernels/kernels.h"
#include "kernels/simd.h"

void ELM_NAME(const elm_glu_args* args) {
  for (size_t pair = 0; pair < args->num_pairs; ++pair) {
    const f16v gate = v_load(args->x + 32 * pair);
    const f16v up = v_load(args->x + 32 * pair + 16);
    f16v argument = gate;
    if (args->is_gelu) { /* 0.5 g (1 + tanh u) = g sigmoid(2 u) */
      const f16v square = v_mul(gate, gate);
      const f16v factor = v_fma(square, v_set(0.0713548162726f), v_set(1.59576912161f));
      argument = v_mul(gate, factor);
    }
    const f16v activated = v_mul(gate, v_sigmoid(argument));
    v_store(args->out + 16 * pair, v_mul(activated, up));
  }
}
