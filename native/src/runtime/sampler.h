/* From logits to a token id. The order of the steps is in ARCHITECTURE.md, "Sampling". */
#ifndef ELM_RUNTIME_SAMPLER_H
#define ELM_RUNTIME_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#include "edgellm/edgellm.h"

/* Scratch of elm_sampler_run, bytes; aligned to 64. Its content means nothing between calls. */
size_t elm_sampler_scratch_bytes(size_t num_logits);

/* Are all parameters in their range, and all biased ids below `num_tokens`? */
elm_status elm_sampling_check(const elm_sampling* sampling, size_t num_tokens, elm_error* error);

/* elm_sample in the caller's scratch: allocates nothing. `sampling` must have passed
 * elm_sampling_check with num_tokens <= num_logits. */
elm_status elm_sampler_run(const float* logits, size_t num_logits, const elm_sampling* sampling,
                           const int32_t* history, size_t num_history, size_t num_generated,
                           uint64_t position, void* scratch, int32_t* id, elm_error* error);

#endif
