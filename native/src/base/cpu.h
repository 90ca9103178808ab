/* What this CPU can do, and how many of them this process may use. */
#ifndef ELM_BASE_CPU_H
#define ELM_BASE_CPU_H

#include <stdbool.h>
#include <stdint.h>

/* Instruction sets a kernel row may ask for, bits of elm_cpu_isas(); REF is always there. */
typedef enum elm_isa {
  ELM_ISA_REF = 0,
  ELM_ISA_AVX2,       /* with FMA and F16C */
  ELM_ISA_AVXVNNI,    /* AVX2 and VNNI in VEX encoding */
  ELM_ISA_AVX512VNNI, /* AVX-512 F, BW, DQ, VL, VNNI */
  ELM_ISA_AMX,        /* tiles and their int8 product, beside AVX-512 VNNI */
  ELM_ISA_NEON,
  ELM_ISA_NEON_DOTPROD,
  ELM_ISA_NEON_I8MM,
  ELM_NUM_ISAS
} elm_isa;

/* "ref", "avx2", ...; NULL if out of range. */
const char* elm_isa_name(elm_isa isa);
/* True and *isa set if `name` is one of the above. */
bool elm_isa_from_name(const char* name, elm_isa* isa);
/* Sets that a CPU with `isa` has as well, itself included: a bit mask of 1 << elm_isa. */
uint32_t elm_isa_implied(elm_isa isa);
/* Bit mask of the sets this CPU and operating system support. Linux is asked for the use of AMX
 * tiles, which holds for the whole process from then on. */
uint32_t elm_cpu_isas(void);
/* Why `isa` is not supported here; "" if it is. */
const char* elm_isa_missing(elm_isa isa);
/* Threads to compute with if none are asked for: CPUs of the affinity mask that are fast enough, at
 * most those a cgroup quota allows; at least 1. `root` is "", or a folder with another sys. */
int32_t elm_cpu_count(const char* root);
/* Keeps, in their order, the CPUs with at least half of the largest capacity among them: all of
 * them where Linux does not say, as on most x86-64. Returns how many. */
int32_t elm_cpu_keep_fast(const char* root, int32_t* cpus, int32_t count);

/* Puts the floating-point unit into the state that all results are defined in (round to nearest,
 * denormals kept) and returns the former state for elm_fpu_restore. */
uint64_t elm_fpu_enter(void);
void elm_fpu_restore(uint64_t state);

#endif
