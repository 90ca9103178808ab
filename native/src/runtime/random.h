/* Random numbers that are a function of (seed, position, id), and the exp and log the sampler
 * needs.
 *
 * Only IEEE double add, multiply and divide, so that every platform draws the same token. */
#ifndef ELM_RUNTIME_RANDOM_H
#define ELM_RUNTIME_RANDOM_H

#include <stdint.h>
#include <string.h>

/* No gumbel number is larger: -log(2^-53 (1 + 2^-53)) = 36.74 */
#define ELM_GUMBEL_MAX 36.8

/* Finaliser of SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators"
 * (2014), with the constants of Stafford's mix 13. */
static inline uint64_t elm_random_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
  return x ^ (x >> 31);
}

/* Start of the stream of one position; each id takes one number of it. */
static inline uint64_t elm_random_stream(uint64_t seed, uint64_t position) {
  const uint64_t odd = UINT64_C(0x9e3779b97f4a7c15);
  return elm_random_mix(elm_random_mix(seed + odd) + position * odd);
}

static inline uint64_t elm_random_bits(uint64_t stream, uint64_t id) {
  return elm_random_mix(stream + (id + 1) * UINT64_C(0x9e3779b97f4a7c15));
}

/* Natural logarithm of a normal x > 0, relative error below 1e-15: x = m 2^e with m around 1, then
 * the series of 2 atanh((m - 1) / (m + 1)). */
static inline double elm_log(double x) {
  uint64_t bits;
  double m, s, s2, sum, e;
  memcpy(&bits, &x, sizeof bits);
  e = (double)((int64_t)(bits >> 52) - 1023);
  bits = (bits & UINT64_C(0x000fffffffffffff)) | UINT64_C(0x3ff0000000000000);
  memcpy(&m, &bits, sizeof m);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    e += 1.0;
  }
  s = (m - 1.0) / (m + 1.0);
  s2 = s * s;
  sum = 0.0;
  for (int k = 23; k >= 3; k -= 2) {
    sum = (sum + 1.0 / k) * s2;
  }
  return e * 0.6931471805599453 + (2.0 * s + 2.0 * s * sum);
}

/* exp(x) for -700 <= x <= 700, relative error below 1e-14. Free of comparisons, so that loops over
 * it become vector code. */
static inline double elm_exp(double x) {
  const double magic = 6755399441055744.0; /* 1.5 * 2^52: adding it rounds to an integer */
  uint64_t bits;
  double shifted, k, r, p, scale;
  shifted = x * 1.4426950408889634 + magic;
  k = shifted - magic;
  r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10; /* ln 2 in two parts */
  p = 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52; /* the low bits of `shifted` are k */
  memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}

/* -log(-log(u)), u = (52 high bits + 1/2) / 2^52: never 0 or 1. */
static inline double elm_gumbel(uint64_t bits) {
  const double u = ((double)(bits >> 12) + 0.5) * 0x1p-52;
  return -elm_log(-elm_log(u));
}

/* At least elm_gumbel(bits), at a tenth of its cost: -log(-log(u)) <= -log(1 - u), and the exponent
 * of 1 - u bounds its logarithm. The small surplus covers the rounding of elm_log. */
static inline double elm_gumbel_bound(uint64_t bits) {
  const double complement = ((double)(~bits >> 12) + 0.5) * 0x1p-52;
  uint64_t representation;
  memcpy(&representation, &complement, sizeof representation);
  return (double)(1023 - (int64_t)(representation >> 52)) * 0.6931471805599453 + 1e-9;
}

#endif
