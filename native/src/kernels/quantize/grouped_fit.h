/* Fits one row of a superblock to the grid of E4 or E5: w = D * (s[g] * q - z[g]). */
#ifndef ELM_KERNELS_QUANTIZE_GROUPED_FIT_H
#define ELM_KERNELS_QUANTIZE_GROUPED_FIT_H

#include <stddef.h>
#include <stdint.h>

#include "edgellm/edgellm.h"
#include "kernels/kernels.h"

enum { ELM_SUPERBLOCK_GROUPS = ELM_SUPERBLOCK / ELM_GROUP };

/* One row of a superblock. */
typedef struct elm_grouped_row {
  float d;                               /* a normal float > 0 */
  uint8_t scale[ELM_SUPERBLOCK_GROUPS];  /* s, 1..15; of E5 1..8 */
  uint8_t offset[ELM_SUPERBLOCK_GROUPS]; /* z, 0..128, and s * (largest q) - z <= 127 */
  uint8_t codes[ELM_SUPERBLOCK];         /* q, 0..15; of E5 0..31 */
} elm_grouped_row;

/* Chooses D, s, z and q together so that the squared error, weighted with `importance`, is small.
 * `weights` are the num_groups * 32 weights of the row, finite and at most 1e30 in size;
 * `importance` has as many numbers within 0..1. A group of zeros gets s = 1, z = 0, q = 0, a row of
 * zeros D = 1. */
void elm_grouped_fit(elm_format format, const float* weights, const float* importance,
                     size_t num_groups, elm_grouped_row* out);

#endif
