#include "base/peak/peak_i8.h"

/* Plain C has no registers to name: the sum of a product of two short arrays, as the compiler
 * makes it, which is what the ref kernels get. */
uint64_t elm_peak_i8__ref(size_t rounds, int32_t* sum) {
  enum { LENGTH = 256 };
  int8_t a[LENGTH], b[LENGTH];
  for (int i = 0; i < LENGTH; ++i) {
    a[i] = (int8_t)(i % 3);
    b[i] = 2;
  }
  uint32_t total = 0;
  for (size_t round = 0; round < rounds; ++round) {
    a[round % LENGTH] = (int8_t)(total & 1);
    for (int i = 0; i < LENGTH; ++i) {
      total += (uint32_t)(a[i] * b[i]);
    }
  }
  *sum = (int32_t)(total & INT32_MAX);
  return (uint64_t)rounds * LENGTH;
}
