/* AMX: eight tiles of up to 16 rows of 64 bytes, and their int8 product. Asm, because GCC 12's
 * intrinsics hide from it that memory is read (8 of a configuration's 64 bytes, nothing of a tile),
 * and it leaves out the stores before them. The compiler uses no tile by itself. A tile is named by
 * a literal; a test puts an emulation in place of the instructions. */
#ifndef ELM_BASE_AMX_H
#define ELM_BASE_AMX_H

#include <stddef.h>
#include <stdint.h>

typedef struct elm_tile_config {
  uint8_t palette; /* 1 */
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16]; /* of tile i; 0: not used */
  uint8_t num_rows[16];
} elm_tile_config;

#if !defined(ELM_TILE_CONFIGURE)
#define ELM_TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(config)))
/* Back to the state in which a context switch saves no tiles. */
#define ELM_TILE_RELEASE() __asm__ volatile("tilerelease")
#define ELM_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define ELM_TILE_LOAD(tile, from, stride)                            \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                \
                   :                                                 \
                   : "r"((const void*)(from)), "r"((size_t)(stride)) \
                   : "memory")
#define ELM_TILE_STORE(tile, to, stride)                     \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)"    \
                   :                                         \
                   : "r"((void*)(to)), "r"((size_t)(stride)) \
                   : "memory")
/* c (rows, 16 int32) += a (rows, 4 k int8) times b (k, 16 x 4 int8). */
#define ELM_TILE_DOT(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#endif

#endif
