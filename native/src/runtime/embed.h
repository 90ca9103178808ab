/* Rows of the embedding. */
#ifndef ELM_RUNTIME_EMBED_H
#define ELM_RUNTIME_EMBED_H

#include "format/file.h"

/* x[0..cols) = row `row` of `tensor` (not F32), each number D * integer. */
void elm_embed_row(const elm_tensor* tensor, size_t row, float* x);

#endif
