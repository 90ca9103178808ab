/* A pool of threads that run one function together. */
#ifndef ELM_BASE_THREADS_H
#define ELM_BASE_THREADS_H

#include "base/status.h"

typedef struct elm_pool elm_pool;

/* `num_threads`, at most 256, counts the caller, which takes part in every run. */
elm_status elm_pool_create(int32_t num_threads, const elm_allocator* allocator, elm_pool** out,
                           elm_error* error);
void elm_pool_destroy(elm_pool* pool);
int32_t elm_pool_num_threads(const elm_pool* pool);

/* Runs function(context, thread) on the first `num_threads` threads of the pool and returns when
 * all are done. Callers take turns. Fails in a child process of a fork, where the threads do not
 * exist. */
elm_status elm_pool_run(elm_pool* pool, int32_t num_threads,
                        void (*function)(void* context, int32_t thread), void* context,
                        elm_error* error);

/* Waits until all threads of the current run are here; what they wrote before is visible after. */
void elm_pool_barrier(elm_pool* pool);

#endif
