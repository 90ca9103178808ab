#include "base/threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/cpu.h"

/* Waiting for work: this many pauses (some 20 to 100 us), then the processor is offered to others,
 * then sleep. Waiting at a barrier: pauses, then sleep. Who sleeps there waits for a thread that
 * has lost its processor to another process; a sleeper gets its own back when it is woken, while
 * one that yields has to wait its turn again. */
enum { NUM_SPINS = 4000, NUM_YIELDS = 200, NUM_BARRIER_SPINS = 10000 };

typedef struct worker {
  elm_pool* pool;
  int32_t thread;
  pthread_t handle;
} worker;

struct elm_pool {
  elm_allocator allocator;
  int32_t num_threads;
  int32_t num_started; /* workers, without the caller */
  pid_t process;
  worker* workers;      /* (num_threads); the first is unused */
  pthread_mutex_t turn; /* held during a run */
  pthread_mutex_t mutex;
  pthread_cond_t wake;   /* a run has begun */
  pthread_cond_t passed; /* a barrier was passed */
  void (*function)(void*, int32_t);
  void* context;
  bool is_closing;
  /* On lines of their own: written by one thread while others spin on them. */
  _Alignas(64) atomic_uint epoch; /* number of runs begun */
  _Alignas(64) atomic_int num_sleeping;
  _Alignas(64) atomic_int num_blocked; /* asleep at the barrier */
  _Alignas(64) atomic_int num_arrived;
  _Alignas(64) atomic_uint generation; /* barriers passed */
};

static inline void pause_cpu(void) {
#if defined(__x86_64__)
  __asm__ volatile("pause");
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Sleeps until the barrier `generation` is passed. The counter is raised before the generation is
 * read, and the last to arrive does it the other way round: one of them sees the other. */
static void sleep_at_barrier(elm_pool* pool, unsigned generation) {
  (void)pthread_mutex_lock(&pool->mutex);
  (void)atomic_fetch_add(&pool->num_blocked, 1);
  while (atomic_load(&pool->generation) == generation) {
    (void)pthread_cond_wait(&pool->passed, &pool->mutex);
  }
  (void)atomic_fetch_sub(&pool->num_blocked, 1);
  (void)pthread_mutex_unlock(&pool->mutex);
}

void elm_pool_barrier(elm_pool* pool) {
  const unsigned generation = atomic_load_explicit(&pool->generation, memory_order_acquire);
  const int arrived = atomic_fetch_add_explicit(&pool->num_arrived, 1, memory_order_acq_rel) + 1;
  if (arrived == pool->num_threads) {
    atomic_store_explicit(&pool->num_arrived, 0, memory_order_relaxed);
    /* An exchange: qemu 7.2 on x86-64 lets a load overtake AArch64's store-release. */
    (void)atomic_exchange(&pool->generation, generation + 1);
    if (atomic_load(&pool->num_blocked) > 0) {
      (void)pthread_mutex_lock(&pool->mutex);
      (void)pthread_cond_broadcast(&pool->passed);
      (void)pthread_mutex_unlock(&pool->mutex);
    }
    return;
  }
  for (unsigned spins = 0; spins < NUM_BARRIER_SPINS; ++spins) {
    if (atomic_load_explicit(&pool->generation, memory_order_acquire) != generation) {
      return;
    }
    pause_cpu();
  }
  sleep_at_barrier(pool, generation);
}

/* Waits for a run after `epoch`; returns its number. */
static unsigned wait_for_work(elm_pool* pool, unsigned epoch) {
  for (unsigned spins = 0; spins < NUM_SPINS + NUM_YIELDS; ++spins) {
    const unsigned now = atomic_load_explicit(&pool->epoch, memory_order_acquire);
    if (now != epoch) {
      return now;
    }
    if (spins < NUM_SPINS) {
      pause_cpu();
    } else {
      (void)sched_yield();
    }
  }
  (void)pthread_mutex_lock(&pool->mutex);
  (void)atomic_fetch_add(&pool->num_sleeping, 1);
  unsigned now;
  while ((now = atomic_load(&pool->epoch)) == epoch) {
    (void)pthread_cond_wait(&pool->wake, &pool->mutex);
  }
  (void)atomic_fetch_sub(&pool->num_sleeping, 1);
  (void)pthread_mutex_unlock(&pool->mutex);
  return now;
}

static void* worker_main(void* argument) {
  const worker* self = argument;
  elm_pool* pool = self->pool;
  (void)elm_fpu_enter();
  unsigned epoch = 0;
  for (;;) {
    epoch = wait_for_work(pool, epoch);
    if (pool->is_closing) {
      return NULL;
    }
    pool->function(pool->context, self->thread);
    elm_pool_barrier(pool);
  }
}

/* Publishes a new epoch; workers may be spinning or asleep. */
static void begin_epoch(elm_pool* pool) {
  (void)atomic_fetch_add(&pool->epoch, 1);
  if (atomic_load(&pool->num_sleeping) > 0) {
    (void)pthread_mutex_lock(&pool->mutex);
    (void)pthread_cond_broadcast(&pool->wake);
    (void)pthread_mutex_unlock(&pool->mutex);
  }
}

elm_status elm_pool_create(int32_t num_threads, const elm_allocator* allocator, elm_pool** out,
                           elm_error* error) {
  *out = NULL;
  elm_pool* pool = allocator->allocate(allocator->context, sizeof *pool, 64);
  if (pool == NULL) {
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for a thread pool");
  }
  const size_t workers_bytes = sizeof(worker) * (size_t)num_threads;
  pool->allocator = *allocator;
  pool->num_threads = num_threads;
  pool->num_started = 0;
  pool->process = getpid();
  pool->is_closing = false;
  atomic_init(&pool->epoch, 0);
  atomic_init(&pool->num_sleeping, 0);
  atomic_init(&pool->num_blocked, 0);
  atomic_init(&pool->num_arrived, 0);
  atomic_init(&pool->generation, 0);
  (void)pthread_mutex_init(&pool->turn, NULL);
  (void)pthread_mutex_init(&pool->mutex, NULL);
  (void)pthread_cond_init(&pool->wake, NULL);
  (void)pthread_cond_init(&pool->passed, NULL);
  pool->workers = allocator->allocate(allocator->context, workers_bytes, 64);
  if (pool->workers == NULL) {
    elm_pool_destroy(pool);
    return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY, "no memory for %d threads", num_threads);
  }
  for (int32_t i = 1; i < num_threads; ++i) {
    worker* new_worker = &pool->workers[i];
    new_worker->pool = pool;
    new_worker->thread = i;
    if (pthread_create(&new_worker->handle, NULL, worker_main, new_worker) != 0) {
      elm_pool_destroy(pool);
      return elm_fail(error, ELM_STATUS_OUT_OF_MEMORY,
                      "the operating system refused thread %d of %d; ask for fewer", i + 1,
                      num_threads);
    }
    pool->num_started = i;
  }
  *out = pool;
  return ELM_STATUS_OK;
}

void elm_pool_destroy(elm_pool* pool) {
  if (pool == NULL) {
    return;
  }
  if (pool->process == getpid()) {
    pool->is_closing = true;
    begin_epoch(pool);
    for (int32_t i = 1; i <= pool->num_started; ++i) {
      (void)pthread_join(pool->workers[i].handle, NULL);
    }
    (void)pthread_cond_destroy(&pool->wake);
    (void)pthread_cond_destroy(&pool->passed);
    (void)pthread_mutex_destroy(&pool->mutex);
    (void)pthread_mutex_destroy(&pool->turn);
  }
  const elm_allocator allocator = pool->allocator;
  if (pool->workers != NULL) {
    allocator.release(allocator.context, pool->workers, sizeof(worker) * (size_t)pool->num_threads);
  }
  allocator.release(allocator.context, pool, sizeof *pool);
}

int32_t elm_pool_num_threads(const elm_pool* pool) { return pool->num_threads; }

elm_status elm_pool_run(elm_pool* pool, void (*function)(void* context, int32_t thread),
                        void* context, elm_error* error) {
  if (pool->process != getpid()) {
    return elm_fail(error, ELM_STATUS_UNSUPPORTED,
                    "the model was opened before this process was forked; open it in the child");
  }
  const uint64_t fpu = elm_fpu_enter();
  (void)pthread_mutex_lock(&pool->turn);
  pool->function = function;
  pool->context = context;
  if (pool->num_threads > 1) {
    begin_epoch(pool);
  }
  function(context, 0);
  elm_pool_barrier(pool);
  (void)pthread_mutex_unlock(&pool->turn);
  elm_fpu_restore(fpu);
  return ELM_STATUS_OK;
}
