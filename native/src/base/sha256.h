/* SHA-256. Source: FIPS 180-4. */
#ifndef ELM_BASE_SHA256_H
#define ELM_BASE_SHA256_H

#include <stddef.h>
#include <stdint.h>

void elm_sha256(const uint8_t* data, size_t size, uint8_t digest[32]);

#endif
