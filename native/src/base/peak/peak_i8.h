/* Loops of nothing but an instruction set's int8 multiply-accumulates, on registers: the limit that
 * prefill is measured against. Each does `rounds` rounds on independent sums, enough to hide their
 * latency, and returns the multiply-accumulates done; *sum keeps them from being left out. */
#ifndef ELM_BASE_PEAK_PEAK_I8_H
#define ELM_BASE_PEAK_PEAK_I8_H

#include <stddef.h>
#include <stdint.h>

typedef uint64_t (*elm_peak_i8_fn)(size_t rounds, int32_t* sum);

/* Hides from the compiler that `value`, in a vector register of class `constraint`, stays the same:
 * else it would multiply once and only add. */
#define ELM_PEAK_OPAQUE(constraint, value) __asm__ volatile("" : "+" constraint(value))

#if defined(__x86_64__)
uint64_t elm_peak_i8__amx(size_t rounds, int32_t* sum);
uint64_t elm_peak_i8__avx512vnni(size_t rounds, int32_t* sum);
uint64_t elm_peak_i8__avxvnni(size_t rounds, int32_t* sum);
uint64_t elm_peak_i8__avx2(size_t rounds, int32_t* sum);
#elif defined(__aarch64__)
uint64_t elm_peak_i8__neon_i8mm(size_t rounds, int32_t* sum);
uint64_t elm_peak_i8__neon_dotprod(size_t rounds, int32_t* sum);
uint64_t elm_peak_i8__neon(size_t rounds, int32_t* sum);
#endif
uint64_t elm_peak_i8__ref(size_t rounds, int32_t* sum);

#endif
