/* Sines and cosines of rotary position embeddings. */
#ifndef ELM_RUNTIME_ROPE_H
#define ELM_RUNTIME_ROPE_H

#include <stddef.h>
#include <stdint.h>

/* cos and sin, each (n), of position * inv_freq[i]: computed in double by a polynomial of our own
 * (no libm, which differs between systems), rounded to float once. */
void elm_rope_table(uint32_t position, const float* inv_freq, size_t n, float* cos, float* sin);

#endif
