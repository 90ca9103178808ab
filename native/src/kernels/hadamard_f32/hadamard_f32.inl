#include "kernels/hadamard.inl"

void ELM_NAME(const elm_hadamard_args* args) {
  for (size_t first = 0; first < args->n; first += ELM_SUPERBLOCK) {
    const size_t left = args->n - first;
    hadamard_halved(args->x + first, left < ELM_SUPERBLOCK ? left : ELM_SUPERBLOCK);
  }
}
