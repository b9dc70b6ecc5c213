/* Test cases of every operation: a table of shapes and options, each of which builds random
 * arguments on any device, runs the operation and brings the outputs back as doubles.
 *
 * Arguments are integers of Philox TEST, or normals drawn from a table of 65,536 of them, and are rounded first, to f32 or to the 16-bit type of the backend
 * under test, so that every backend sees the same values. Arguments that belong to a sample depend on the sample's id alone, not on its slot in the
 * batch. Outputs are filled with 0xFF bytes (NaN) before, and have a guard behind them and gaps
 * between their rows where they are slices of a wider buffer: what the operation may not touch must
 * still be 0xFF afterwards. */
#pragma once
#include "kernels/device.h"
#include <stdbool.h>
#include <stdint.h>

enum { OP_OUTPUTS_MAX = 8, OP_BATCH_MAX = 16 };

struct op_output {
    const char *name; /* "dx" */
    int64_t count;    /* values in v */
    bool per_sample;  /* the first dimension is the batch: count / batch values a sample */
    bool exact;       /* no rounding is involved: equal on every backend */
    bool twin;        /* it has the bits of the output before it */
    double *v;
};

struct op_result {
    int64_t batch;
    int n_out;
    struct op_output out[OP_OUTPUTS_MAX];
    bool wrote_outside; /* a guard or a gap was overwritten */
};

int op_case_count(void);          /* of op_cases.def */
int op_case_count_all(void);      /* then come those of op_shapes.def */
const char *op_case_op(int i);    /* "linear_forward" */
const char *op_case_shape(int i); /* ".B = 1, .K = 7", as the table has it */

/* What may vary without changing a sample's outputs. */
struct op_variant {
    const uint64_t
        *ids; /* the sample in each slot: OP_BATCH_MAX numbers below 2^32; NULL: 0, 1, 2 ... */
    bool misaligned; /* tensors are aligned to 8 bytes only, to 16 where ops.h asks for it */
    /* Gives scratch memory that nobody has written, and that the case does not free. NULL: the device's,
     * with NaN in it. */
    int (*fresh_scratch)(size_t bytes, void **ret);
    lg_dtype round; /* inputs hold values of this type: LG_F32 (0), LG_F16 or LG_BF16 */
};

/* Runs case i on d; variant may be NULL. Aborts where the device fails: these are tests. Free the
 * result with op_result_free. */
void op_case_run(int i, lg_device *d, const struct op_variant *variant, struct op_result *ret);
void op_result_free(struct op_result *r);
