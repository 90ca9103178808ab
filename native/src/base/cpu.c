#include "base/cpu.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

static const char* const isa_names[ELM_NUM_ISAS] = {"ref", "avx2", "avxvnni",      "avx512vnni",
                                                    "amx", "neon", "neon_dotprod", "neon_i8mm"};

const char* elm_isa_name(elm_isa isa) {
  return (unsigned)isa < ELM_NUM_ISAS ? isa_names[isa] : NULL;
}

bool elm_isa_from_name(const char* name, elm_isa* isa) {
  for (int i = 0; i < ELM_NUM_ISAS; ++i) {
    if (strcmp(name, isa_names[i]) == 0) {
      *isa = (elm_isa)i;
      return true;
    }
  }
  return false;
}

#define BIT(isa) (UINT32_C(1) << (isa))

uint32_t elm_isa_implied(elm_isa isa) {
  switch (isa) {
    case ELM_ISA_AVX2: return BIT(ELM_ISA_REF) | BIT(ELM_ISA_AVX2);
    case ELM_ISA_AVXVNNI: return elm_isa_implied(ELM_ISA_AVX2) | BIT(ELM_ISA_AVXVNNI);
    case ELM_ISA_AVX512VNNI: return elm_isa_implied(ELM_ISA_AVX2) | BIT(ELM_ISA_AVX512VNNI);
    case ELM_ISA_AMX: return elm_isa_implied(ELM_ISA_AVX512VNNI) | BIT(ELM_ISA_AMX);
    case ELM_ISA_NEON: return BIT(ELM_ISA_REF) | BIT(ELM_ISA_NEON);
    case ELM_ISA_NEON_DOTPROD:
      return BIT(ELM_ISA_REF) | BIT(ELM_ISA_NEON) | BIT(ELM_ISA_NEON_DOTPROD);
    case ELM_ISA_NEON_I8MM: return elm_isa_implied(ELM_ISA_NEON_DOTPROD) | BIT(ELM_ISA_NEON_I8MM);
    default: return BIT(ELM_ISA_REF);
  }
}

#if defined(__x86_64__)

static uint64_t read_xcr0(void) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

/* Why a CPU with AVX-512 VNNI cannot use AMX; "" if it can. */
static const char* amx_missing(void) {
#if defined(__linux__)
  enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
  unsigned a, b, c, d;
  const unsigned tile_and_int8 = 1u << 24 | 1u << 25;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tile_and_int8) != tile_and_int8) {
    return "this CPU lacks AMX-INT8";
  }
  if ((read_xcr0() >> 17 & 3) != 3) {
    return "the operating system does not save AMX tiles (Linux does from 5.16 on)";
  }
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) {
    return "Linux refused this process the use of AMX tiles (arch_prctl)";
  }
  return "";
#else
  return "AMX is used on Linux only";
#endif
}

uint32_t elm_cpu_isas(void) {
  uint32_t isas = BIT(ELM_ISA_REF);
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) {
    return isas;
  }
  const bool has_osxsave = (c & (1u << 27)) != 0;
  const bool has_avx_fma_f16c = (c & (1u << 28)) && (c & (1u << 12)) && (c & (1u << 29));
  if (!has_osxsave || !has_avx_fma_f16c) {
    return isas;
  }
  const uint64_t xcr0 = read_xcr0();
  if ((xcr0 & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & (1u << 5))) {
    return isas;
  }
  isas |= BIT(ELM_ISA_AVX2);
  const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
  if ((xcr0 & 0xE6) == 0xE6 && (b & avx512) == avx512 && (c & (1u << 11))) {
    isas |= BIT(ELM_ISA_AVX512VNNI);
    isas |= amx_missing()[0] == '\0' ? BIT(ELM_ISA_AMX) : 0;
  }
  const bool has_subleaf_1 = a >= 1;
  if (has_subleaf_1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4))) {
    isas |= BIT(ELM_ISA_AVXVNNI);
  }
  return isas;
}

uint64_t elm_fpu_enter(void) {
  const uint64_t state = _mm_getcsr();
  _mm_setcsr(0x1F80); /* all exceptions masked, round to nearest, no flush to zero */
  return state;
}

void elm_fpu_restore(uint64_t state) { _mm_setcsr((unsigned)state); }

#elif defined(__aarch64__)

uint32_t elm_cpu_isas(void) {
  uint32_t isas = BIT(ELM_ISA_REF) | BIT(ELM_ISA_NEON);
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & (1UL << 20)) { /* HWCAP_ASIMDDP */
    isas |= BIT(ELM_ISA_NEON_DOTPROD);
    if (getauxval(AT_HWCAP2) & (1UL << 13)) { /* HWCAP2_I8MM */
      isas |= BIT(ELM_ISA_NEON_I8MM);
    }
  }
#elif defined(__APPLE__)
  isas |= BIT(ELM_ISA_NEON_DOTPROD);
#endif
  return isas;
}

uint64_t elm_fpu_enter(void) {
  uint64_t state;
  __asm__ volatile("mrs %0, fpcr" : "=r"(state));
  __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(0)));
  return state;
}

void elm_fpu_restore(uint64_t state) { __asm__ volatile("msr fpcr, %0" : : "r"(state)); }

#else

uint32_t elm_cpu_isas(void) { return BIT(ELM_ISA_REF); }
uint64_t elm_fpu_enter(void) { return 0; }
void elm_fpu_restore(uint64_t state) { (void)state; }

#endif

const char* elm_isa_missing(elm_isa isa) {
  if (elm_cpu_isas() & BIT(isa)) {
    return "";
  }
#if defined(__x86_64__)
  const bool is_foreign =
      isa == ELM_ISA_NEON || isa == ELM_ISA_NEON_DOTPROD || isa == ELM_ISA_NEON_I8MM;
#elif defined(__aarch64__)
  const bool is_foreign = isa >= ELM_ISA_AVX2 && isa <= ELM_ISA_AMX;
#else
  const bool is_foreign = true;
#endif
  if (is_foreign) {
    return "for another architecture";
  }
  switch (isa) {
    case ELM_ISA_AVX2: return "this CPU or its operating system lacks AVX2, FMA or F16C";
    case ELM_ISA_AVXVNNI: return "this CPU lacks AVX-VNNI, or AVX2 with FMA and F16C";
    case ELM_ISA_AVX512VNNI:
      return "this CPU or its operating system lacks AVX-512 F, BW, DQ, VL or VNNI";
#if defined(__x86_64__)
    case ELM_ISA_AMX:
      return *elm_isa_missing(ELM_ISA_AVX512VNNI) != '\0' ? elm_isa_missing(ELM_ISA_AVX512VNNI)
                                                          : amx_missing();
#endif
    case ELM_ISA_NEON_DOTPROD: return "this CPU lacks the dot product instructions (asimddp)";
    case ELM_ISA_NEON_I8MM: return "this CPU lacks the int8 matrix instructions (i8mm)";
    default: return "not supported by this CPU";
  }
}

/* Numbers at the start of a file below `root`; 0 of them if it cannot be read. */
static int read_numbers(const char* root, const char* path, long long* first, long long* second) {
  char name[512];
  const int length = snprintf(name, sizeof name, "%s%s", root, path);
  FILE* file = length > 0 && (size_t)length < sizeof name ? fopen(name, "r") : NULL;
  if (file == NULL) {
    return 0;
  }
  const int count = fscanf(file, "%lld %lld", first, second);
  (void)fclose(file);
  return count > 0 ? count : 0; /* "max 100000", no limit, has none */
}

/* CPUs a cgroup quota allows, rounded up; 0 if there is no quota. */
static int32_t read_cgroup_quota(const char* root) {
  long long quota = -1, period = 0, rest;
  if (read_numbers(root, "/sys/fs/cgroup/cpu.max", &quota, &period) == 0) {
    (void)read_numbers(root, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &quota, &rest);
    (void)read_numbers(root, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period, &rest);
  }
  if (quota <= 0 || period <= 0) {
    return 0;
  }
  const long long cpus = (quota + period - 1) / period;
  return cpus > 4096 ? 4096 : (int32_t)cpus;
}

/* 0: Linux does not say. */
static long long read_capacity(const char* root, int32_t cpu) {
  char path[64];
  long long capacity = 0, rest;
  (void)snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
  return read_numbers(root, path, &capacity, &rest) > 0 ? capacity : 0;
}

int32_t elm_cpu_keep_fast(const char* root, int32_t* cpus, int32_t count) {
  long long largest = 0;
  for (int32_t i = 0; i < count; ++i) {
    const long long capacity = read_capacity(root, cpus[i]);
    largest = capacity > largest ? capacity : largest;
  }
  int32_t kept = 0;
  for (int32_t i = 0; i < count; ++i) {
    if (2 * read_capacity(root, cpus[i]) >= largest) {
      cpus[kept++] = cpus[i];
    }
  }
  return kept;
}

int32_t elm_cpu_count(const char* root) {
  int32_t count = 0;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    int32_t cpus[CPU_SETSIZE];
    for (size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) {
        cpus[count++] = (int32_t)cpu;
      }
    }
    count = elm_cpu_keep_fast(root, cpus, count);
  }
#endif
  if (count <= 0) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    count = online > 0 ? (int32_t)online : 1;
  }
  const int32_t quota = read_cgroup_quota(root);
  return quota > 0 && quota < count ? quota : count;
}
