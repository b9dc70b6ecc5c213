/* Arguments of operations for tests: random inputs, poisoned outputs, slices of wider buffers, and the
 * outputs' way back. Only op_cases.c uses this. */
#pragma once
#include "base/check.h"
#include "kernels/ops.h"
#include "tests/unit/op_cases.h"

enum { OP_BUFFERS_MAX = 24 };

enum op_flags {
    OP_SAMPLE = 1, /* first dimension is the batch */
    OP_FILLED = 2, /* an output that starts with values: accumulated to, or aliased */
    OP_EXACT = 4,  /* an output without rounding */
    OP_OUTPUT = 8, /* a pack whose slices are outputs */
    OP_STATS = 16, /* of the type of statistics and optimizer state: fp32 where F has 16 bits */
    OP_TWIN = 32,  /* an output that has the bits of the one declared before it */
};

/* Rows of samples of so many tokens lie as two streams (ops.def: attention), with `first` tokens of the first one; 0: one by one. */
struct op_streams {
    int64_t tokens, first;
};

struct op_buffer {
    void *device; /* the elements start `lead` bytes behind it */
    size_t lead, bytes;
    lg_dtype dtype;
    double *values; /* of an input, sample by sample whatever the streams */
    struct op_streams streams;
    bool output;
};

struct op_declared {
    const char *name;
    int buffer, flags;
    int64_t offset, rows, row, stride; /* elements */
};

/* One call of an operation in the making. */
struct op_run {
    lg_device *device;
    lg_stream *stream;
    lg_dtype F, stats; /* the device's compute type; that of statistics and optimizer state */
    lg_dtype round;    /* to which every value is rounded that is not of stats */
    const uint64_t *ids;
    uint64_t seed;
    int64_t batch;
    bool dry;    /* the stream computes nothing: floats are not drawn and nothing is uploaded */
    size_t lead; /* bytes by which every buffer is off the allocation's alignment */
    struct op_streams streams; /* of buffers that are made from now on */
    int n_buffers, n_outs;
    struct op_buffer buffer[OP_BUFFERS_MAX];
    struct op_declared out[OP_OUTPUTS_MAX];
};

/* A wide buffer of rows of which tensors are slices. */
struct op_pack {
    int buffer, flags;
    int64_t rows, stride;
};

/* The last two arguments of what follows: rank and dimensions. */
#define DIMS(...)                                                                                  \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[])                         \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }

/* Random inputs: standard normals times scale, rounded to r->round; integers of [low, high]. */
lg_tensor op_in(struct op_run *r, int flags, double scale, int rank, const int64_t *dim);
lg_tensor op_in_integers(struct op_run *r, lg_dtype dtype, int flags, int64_t low, int64_t high,
                         int rank, const int64_t *dim);
/* An input whose values the caller has computed; rounded here. */
lg_tensor op_in_values(struct op_run *r, lg_dtype dtype, int flags, const double *v, int rank,
                       const int64_t *dim);
/* The values behind an input, also of a slice. */
const double *op_values_of(const struct op_run *r, lg_tensor t);

lg_tensor op_out(struct op_run *r, const char *name, int flags, int rank, const int64_t *dim);
lg_tensor op_out_typed(struct op_run *r, const char *name, lg_dtype dtype, int flags, int rank,
                       const int64_t *dim);
/* An input and an output, or one tensor that is both. */
void op_in_out(struct op_run *r, bool alias, const char *name, int flags, lg_tensor *ret_in,
               lg_tensor *ret_out, int rank, const int64_t *dim);

struct op_pack op_pack(struct op_run *r, int flags, int64_t rows, int64_t stride);
/* Columns [offset, offset + width) of the pack; name: of an output. */
lg_tensor op_slice(struct op_run *r, struct op_pack p, const char *name, int64_t offset,
                   int64_t width, int rank, const int64_t *dim);

/* For an operation that breaks on an error: these are tests. */
void op_must(int rc);
/* Downloads the outputs and looks at what lies around them. */
void op_collect(struct op_run *r, struct op_result *ret);
/* Frees the buffers; the run can be filled again. */
void op_release(struct op_run *r);

/* The means of all rows of x (rows, D), of an RMSNorm zeros, then all 1 / sqrt(mean of the squares about it + 1e-6); the
 * caller frees. */
double *op_row_stats(const double *x, int64_t rows, int64_t D, bool rms);
/* o (B, T, H, d) and lse (B, H, T) of attention, from the inputs' values. */
void op_softmax_rows(const struct op_run *r, const struct lg_attention_backward_args *a,
                     double *ret_o, double *ret_lse);
