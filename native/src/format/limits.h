/* Constants of the .edge file; the same as in edgellm/format/spec.py (a test compares them), where
 * ELM_X is X. */
#ifndef ELM_FORMAT_LIMITS_H
#define ELM_FORMAT_LIMITS_H

#include <stdint.h>

#include "edgellm/edgellm.h"

#define ELM_MAGIC \
  "\x89"          \
  "EDGE\r\n\x1a"
#define ELM_MAJOR 1
#define ELM_SUPERBLOCK_BYTES 4096
#define ELM_SECTION_ENTRY_BYTES 128
#define ELM_TENSOR_ENTRY_BYTES 128
#define ELM_KNOWN_INCOMPATIBLE 0

#define ELM_MAX_SECTIONS 1024
#define ELM_MAX_TENSORS 65536
#define ELM_MAX_DIM 2147483647
#define ELM_MAX_META_BYTES 1048576
#define ELM_MAX_TOKENIZER_BYTES 67108864
#define ELM_MAX_CHAT_TEMPLATE_BYTES 262144
#define ELM_MAX_GENERATION_CONFIG_BYTES 65536
#define ELM_MAX_TEST_VECTORS_BYTES 1048576
#define ELM_MAX_WEIGHTS_BYTES 4398046511104

#define ELM_MAX_JSON_DEPTH 32
#define ELM_MAX_JSON_DIGITS 17

#define ELM_MAX_LAYERS 512
#define ELM_MAX_HIDDEN_SIZE 1048576
#define ELM_MAX_HEADS 4096
#define ELM_MAX_HEAD_DIM 1024
#define ELM_MAX_FFN_SIZE 4194304
#define ELM_MAX_VOCAB_SIZE 16777216
#define ELM_MAX_CONTEXT 16777216
#define ELM_MAX_ROPES 16
#define ELM_HEAD_DIM_MULTIPLE 16
#define ELM_MAX_ARCHITECTURE_BYTES 31

#define ELM_TENSOR_ALIGN 4096
#define ELM_MIN_ALIGN_LOG2 3
#define ELM_MAX_ALIGN_LOG2 16
#define ELM_WEIGHTS_ALIGN_LOG2 16

#define ELM_PANEL_ROWS 16
#define ELM_SUPERBLOCK_COLS 256
#define ELM_GROUP_COLS 32
#define ELM_LINE_BYTES 64

#define ELM_FLAG_MUST_UNDERSTAND 1

typedef enum elm_section_type {
  ELM_SECTION_META = 1,
  ELM_SECTION_TOKENIZER = 2,
  ELM_SECTION_CHAT_TEMPLATE = 3,
  ELM_SECTION_GENERATION_CONFIG = 4,
  ELM_SECTION_TEST_VECTORS = 5,
  ELM_SECTION_TENSOR_INDEX = 6,
  ELM_SECTION_WEIGHTS = 7
} elm_section_type;

/* Bytes of a (rows, cols) tensor. rows and cols are 1..ELM_MAX_DIM, so that nothing overflows. */
static inline uint64_t elm_layout_bytes(elm_format format, uint64_t rows, uint64_t cols) {
  if (format == ELM_FORMAT_F32) {
    return rows * cols * 4;
  }
  const uint64_t num_panels = (rows + ELM_PANEL_ROWS - 1) / ELM_PANEL_ROWS;
  const uint64_t num_groups = (cols + ELM_GROUP_COLS - 1) / ELM_GROUP_COLS;
  const uint64_t num_superblocks = (cols + ELM_SUPERBLOCK_COLS - 1) / ELM_SUPERBLOCK_COLS;
  const uint64_t code_lines = format == ELM_FORMAT_E4 ? 4 : format == ELM_FORMAT_E5 ? 5 : 8;
  const uint64_t scale_lines = format == ELM_FORMAT_E8 ? 1 : 4;
  const uint64_t num_lines = num_groups * code_lines + num_superblocks * scale_lines;
  return num_panels * num_lines * ELM_LINE_BYTES;
}

#endif
