/* The elementwise and row operations as work on columns: element i of each output belongs to column i,
 * and so does element i of each input (of each row of it). Where one operation has several such views
 * (attention: the head's elements, its keys, its queries), each is a line of columns.def. */
#pragma once
#include "kernels/device.h"
#include "kernels/tensor.h"
#include <stdbool.h>

enum {
    COLUMN_ROWS = 6,    /* of a tensor of rows: four at once and two behind them */
    COLUMN_VECTOR = 16, /* elements of the longest vector */
    COLUMN_SHORT = 3 * COLUMN_VECTOR + 1,
    COLUMN_FLAT = 2 * 16384 + 5, /* three of the pieces that threads share, the last one short */
    COLUMN_WIDE = 1024 + COLUMN_VECTOR, /* two of sum_rows' strips */
    COLUMN_INS = 5,
    COLUMN_OUTS = 4,
};

/* One call: n columns. A tensor of several rows has row after row. Inputs may be changed. */
struct column_call {
    lg_stream *stream;
    int64_t n;
    void *in[COLUMN_INS], *out[COLUMN_OUTS];
    int variant; /* which options: each function knows its own */
};

struct column_work {
    const char *op;
    void (*run)(struct column_call *);
    int first, variants;                  /* first, first + 1 ... */
    int in[COLUMN_INS], out[COLUMN_OUTS]; /* rows of each; 0: there is none */
    int wide;                             /* the longest row; 0: COLUMN_SHORT */
    bool row_enters;                      /* a statistic of the whole row does */
    bool place_enters;                    /* an element's number in the row does */
    lg_dtype in_type, out_type;           /* LG_F32 unless given */
};

/* Ends with op NULL. */
extern const struct column_work COLUMN_WORK[];
