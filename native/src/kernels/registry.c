#include <string.h>

#include "base/status.h"
#include "kernels/kernels.h"

static const elm_kernel_row rows[] = {
#define ELM_KERNEL(op, isa_name, isa) \
  {ELM_OP_##op, #op, "elm_" #op "__" #isa_name, isa, (void (*)(void))elm_##op##__##isa_name},
#include "kernels/kernels.inc"
#undef ELM_KERNEL
};
enum { NUM_ROWS = sizeof rows / sizeof rows[0] };

size_t elm_kernel_rows(const elm_kernel_row** out) {
  *out = rows;
  return NUM_ROWS;
}

/* The first row of `op` that `isas` allows; `ref` ends the search. */
static const elm_kernel_row* choose(elm_op op, uint32_t isas) {
  for (size_t i = 0; i + 1 < NUM_ROWS; ++i) {
    if (rows[i].op == op && (isas & (UINT32_C(1) << rows[i].isa))) {
      return &rows[i];
    }
  }
  return &rows[NUM_ROWS - 1];
}

void elm_kernels_choose(uint32_t isas, elm_kernels* out) {
  const elm_kernel_row* row;
  out->isa = ELM_ISA_REF;
#define ELM_OP_CHOOSE(op_name, args)                \
  row = choose(ELM_OP_##op_name, isas | 1u);        \
  out->op_name = (elm_##op_name##_fn)row->function; \
  out->names[ELM_OP_##op_name] = row->name;         \
  if (row->isa > out->isa) {                        \
    out->isa = row->isa;                            \
  }
  ELM_OPS(ELM_OP_CHOOSE)
#undef ELM_OP_CHOOSE
  out->gemv_rows = elm_gemv_rows(choose(ELM_OP_gemv_q8_e4, isas | 1u)->isa);
}

size_t elm_kernel_count(void) { return NUM_ROWS; }

elm_status elm_kernel_get(size_t index, elm_kernel_info* info, elm_error* error) {
  if (info == NULL || info->struct_size != sizeof *info) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT,
                    "elm_kernel_info has the wrong struct_size: set it to sizeof(elm_kernel_info)");
  }
  if (index >= NUM_ROWS) {
    return elm_fail(error, ELM_STATUS_INVALID_ARGUMENT, "kernel %zu of %d does not exist", index,
                    (int)NUM_ROWS);
  }
  const elm_kernel_row* row = &rows[index];
  const uint32_t isas = elm_cpu_isas();
  info->is_compiled = 1;
  info->is_supported = (isas >> row->isa) & 1;
  info->is_chosen = choose(row->op, elm_kernels_fast_isas()) == row;
  (void)strncpy(info->op, row->op_name, sizeof info->op - 1);
  info->op[sizeof info->op - 1] = '\0';
  (void)strncpy(info->name, row->name, sizeof info->name - 1);
  info->name[sizeof info->name - 1] = '\0';
  (void)strncpy(info->isa, elm_isa_name(row->isa), sizeof info->isa - 1);
  info->isa[sizeof info->isa - 1] = '\0';
  (void)strncpy(info->reason, elm_isa_missing(row->isa), sizeof info->reason - 1);
  info->reason[sizeof info->reason - 1] = '\0';
  return ELM_STATUS_OK;
}
