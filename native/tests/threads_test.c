/* The pool with changing numbers of threads, and which CPUs count. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/memory.h"
#include "base/threads.h"
#include "check.h"

enum { NUM_THREADS = 5, NUM_RUNS = 1000 };

typedef struct run {
  elm_pool* pool;
  int32_t num_threads;
  atomic_int counts[NUM_THREADS];
  atomic_int num_before; /* threads that came to the barrier */
  atomic_int num_wrong;
} run;

static void work(void* context, int32_t thread) {
  run* r = context;
  (void)atomic_fetch_add(&r->counts[thread], 1);
  (void)atomic_fetch_add(&r->num_before, 1);
  elm_pool_barrier(r->pool);
  if (atomic_load(&r->num_before) != r->num_threads) {
    (void)atomic_fetch_add(&r->num_wrong, 1);
  }
}

/* Every thread asked for takes part once, no other does; now and then all have gone to sleep. */
static void check_runs(void) {
  const elm_allocator allocator = elm_allocator_default();
  run r = {0};
  elm_error error;
  CHECK(elm_pool_create(NUM_THREADS, &allocator, &r.pool, &error) == ELM_STATUS_OK);
  int expected[NUM_THREADS] = {0};
  for (int i = 0; i < NUM_RUNS; ++i) {
    r.num_threads = 1 + i * 7 % 11 % NUM_THREADS;
    atomic_store(&r.num_before, 0);
    CHECK(elm_pool_run(r.pool, r.num_threads, work, &r, &error) == ELM_STATUS_OK);
    CHECK(atomic_load(&r.num_before) == r.num_threads);
    for (int t = 0; t < r.num_threads; ++t) {
      ++expected[t];
    }
    if (i % 100 == 0) {
      (void)nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
  }
  for (int t = 0; t < NUM_THREADS; ++t) {
    CHECK(atomic_load(&r.counts[t]) == expected[t]);
  }
  CHECK(atomic_load(&r.num_wrong) == 0);
  elm_pool_destroy(r.pool);
}

static void make_folder(const char* root, const char* path) {
  char name[256];
  (void)snprintf(name, sizeof name, "%s/%s", root, path);
  CHECK(mkdir(name, 0700) == 0);
}

static void write_file(const char* root, const char* path, const char* text) {
  char name[256];
  (void)snprintf(name, sizeof name, "%s/%s", root, path);
  FILE* file = fopen(name, "w");
  CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

/* Eight cores of three sizes as boards have them, of which the process may use some. */
static void check_cpus(void) {
  char root[] = "/tmp/edgellm-cpus-XXXXXX";
  CHECK(mkdtemp(root) != NULL);
  int32_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(elm_cpu_keep_fast(root, all, 8) == 8); /* nothing is known */
  static const char* const folders[] = {"sys",
                                        "sys/fs",
                                        "sys/fs/cgroup",
                                        "sys/devices",
                                        "sys/devices/system",
                                        "sys/devices/system/cpu"};
  for (size_t i = 0; i < sizeof folders / sizeof folders[0]; ++i) {
    make_folder(root, folders[i]);
  }
  static const char* const capacities[] = {"377\n", "377\n", "377\n",  "377\n",
                                           "512\n", "900\n", "1024\n", "1024\n"};
  for (int cpu = 0; cpu < 8; ++cpu) {
    char path[64];
    (void)snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%d", cpu);
    make_folder(root, path);
    (void)snprintf(path, sizeof path, "sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
    write_file(root, path, capacities[cpu]);
  }
  CHECK(elm_cpu_keep_fast(root, all, 8) == 4);
  CHECK(all[0] == 4 && all[1] == 5 && all[2] == 6 && all[3] == 7);
  int32_t small[] = {0, 2, 3};
  CHECK(elm_cpu_keep_fast(root, small, 3) == 3); /* alike: nothing better may be used */
  int32_t some[] = {1, 3, 7};
  CHECK(elm_cpu_keep_fast(root, some, 3) == 1 && some[0] == 7);

  const int32_t unlimited = elm_cpu_count(root);
  CHECK(unlimited >= 1 && unlimited <= elm_cpu_count("/nowhere"));
  write_file(root, "sys/fs/cgroup/cpu.max", "max 100000\n");
  CHECK(elm_cpu_count(root) == unlimited);
  write_file(root, "sys/fs/cgroup/cpu.max", "80000 100000\n");
  CHECK(elm_cpu_count(root) == 1);
  char command[64];
  (void)snprintf(command, sizeof command, "rm -r %s", root);
  CHECK(system(command) == 0);
}

int main(void) {
  check_runs();
  check_cpus();
  return check_result();
}
