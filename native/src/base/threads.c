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
  pthread_cond_t wake; /* a run has begun that this thread takes part in */
  atomic_bool is_sleeping;
} worker;

/* A run's number and how many threads take part in it, in one word: who reads one late must not
 * meet the other of a later run. */
enum { MAX_POOL_THREADS = 256, EPOCH_STEP = 2 * MAX_POOL_THREADS };

struct elm_pool {
  elm_allocator allocator;
  int32_t num_threads;
  int32_t num_started; /* workers, without the caller */
  pid_t process;
  worker* workers;      /* (num_threads); the first is unused */
  pthread_mutex_t turn; /* held during a run */
  pthread_mutex_t mutex;
  pthread_cond_t passed; /* a barrier was passed */
  int32_t num_active;    /* threads of the current run */
  void (*function)(void*, int32_t);
  void* context;
  bool is_closing;
  /* On lines of their own: written by one thread while others spin on them. */
  _Alignas(64) atomic_uint epoch;      /* runs begun * EPOCH_STEP + threads of the last */
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
  const int32_t num_active = pool->num_active; /* read before arriving: a later run may change it */
  const int arrived = atomic_fetch_add_explicit(&pool->num_arrived, 1, memory_order_acq_rel) + 1;
  if (arrived == num_active) {
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

static inline bool has_work(const worker* self, unsigned now, unsigned epoch) {
  return now != epoch && (unsigned)self->thread < now % EPOCH_STEP;
}

/* Waits for a run after `epoch` that this thread takes part in; returns its epoch. */
static unsigned wait_for_work(worker* self, unsigned epoch) {
  elm_pool* pool = self->pool;
  for (unsigned spins = 0; spins < NUM_SPINS + NUM_YIELDS; ++spins) {
    const unsigned now = atomic_load_explicit(&pool->epoch, memory_order_acquire);
    if (has_work(self, now, epoch)) {
      return now;
    }
    if (spins < NUM_SPINS) {
      pause_cpu();
    } else {
      (void)sched_yield();
    }
  }
  (void)pthread_mutex_lock(&pool->mutex);
  atomic_store(&self->is_sleeping, true);
  unsigned now;
  while (!has_work(self, now = atomic_load(&pool->epoch), epoch)) {
    (void)pthread_cond_wait(&self->wake, &pool->mutex);
  }
  atomic_store(&self->is_sleeping, false);
  (void)pthread_mutex_unlock(&pool->mutex);
  return now;
}

static void* worker_main(void* argument) {
  worker* self = argument;
  elm_pool* pool = self->pool;
  (void)elm_fpu_enter();
  unsigned epoch = 0;
  for (;;) {
    epoch = wait_for_work(self, epoch);
    if (pool->is_closing) {
      return NULL;
    }
    pool->function(pool->context, self->thread);
    elm_pool_barrier(pool);
  }
}

/* Publishes a run of the first `num_threads`; they may be spinning or asleep, and the others sleep
 * on. */
static void begin_epoch(elm_pool* pool, int32_t num_threads) {
  const unsigned runs = atomic_load(&pool->epoch) / EPOCH_STEP + 1;
  (void)atomic_exchange(&pool->epoch, runs * EPOCH_STEP + (unsigned)num_threads);
  for (int32_t i = 1; i < num_threads; ++i) {
    if (atomic_load(&pool->workers[i].is_sleeping)) {
      (void)pthread_mutex_lock(&pool->mutex);
      (void)pthread_cond_signal(&pool->workers[i].wake);
      (void)pthread_mutex_unlock(&pool->mutex);
    }
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
  pool->num_active = num_threads;
  pool->num_started = 0;
  pool->process = getpid();
  pool->is_closing = false;
  atomic_init(&pool->epoch, 0);
  atomic_init(&pool->num_blocked, 0);
  atomic_init(&pool->num_arrived, 0);
  atomic_init(&pool->generation, 0);
  (void)pthread_mutex_init(&pool->turn, NULL);
  (void)pthread_mutex_init(&pool->mutex, NULL);
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
    (void)pthread_cond_init(&new_worker->wake, NULL);
    atomic_init(&new_worker->is_sleeping, false);
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
    begin_epoch(pool, pool->num_started + 1);
    for (int32_t i = 1; i <= pool->num_started; ++i) {
      (void)pthread_join(pool->workers[i].handle, NULL);
      (void)pthread_cond_destroy(&pool->workers[i].wake);
    }
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

elm_status elm_pool_run(elm_pool* pool, int32_t num_threads,
                        void (*function)(void* context, int32_t thread), void* context,
                        elm_error* error) {
  if (pool->process != getpid()) {
    return elm_fail(error, ELM_STATUS_UNSUPPORTED,
                    "the model was opened before this process was forked; open it in the child");
  }
  const uint64_t fpu = elm_fpu_enter();
  (void)pthread_mutex_lock(&pool->turn);
  pool->function = function;
  pool->context = context;
  pool->num_active = num_threads;
  if (num_threads > 1) {
    begin_epoch(pool, num_threads);
  }
  function(context, 0);
  elm_pool_barrier(pool);
  (void)pthread_mutex_unlock(&pool->turn);
  elm_fpu_restore(fpu);
  return ELM_STATUS_OK;
}
