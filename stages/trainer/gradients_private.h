/* Between the files of gradients.h: gradients_memory.c has the memory, gradients.c what FORWARD writes and gives away,
 * gradients_sum.c what is added of all ranks. */
#pragma once
#include "kernels/ops.h"
#include "stages/trainer/gradients.h"

enum { LG_GRADIENTS_NOTHING = -1 };

struct lg_gradients_range {
    size_t first, count; /* elements of the flat buffer */
};

struct lg_gradients {
    lg_stage *st;
    lg_device *device;
    lg_stream *compute, *adder, *lane; /* lane: the copies of a plan that is apart, else NULL */
    const lg_trainer_state *state;
    int me, ranks;
    bool scatters;
    uint64_t micros;
    lg_region *grad[LG_INSTANCES_MAX], *sum;
    struct lg_host_gradients host; /* all NULL with one */
    struct lg_ring ring;
    char *made; /* where the backward writes: the own region, or memory cut like it */
    struct lg_gradients_range *untouched; /* what no backward writes: gaps, in order */
    size_t n_untouched;
    float *sink;    /* where units go that are given already */
    float *reduced; /* (shard): whole gradients of several ranks, added up */
    float *staged;  /* (shard): LG_HOST_WAY_STAGED: what goes to the other hosts, what came */
    double *squares, *host_squares; // (pieces of the shard), device and host
    lg_mark *squares_of;            /* [units]: the step whose squares lie there */
    lg_event *event[2];
    int pending, pending_event; /* a unit that is done, but not given; LG_GRADIENTS_NOTHING: none */
    uint64_t step, micro;
    uint64_t given_before; /* units of this micro-batch that a former life has given */
};

/* Squares that are kept of so many elements. */
static inline size_t lg_gradients_squares(size_t count)
{
    return (count + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE;
}

static inline struct lg_stamp *lg_gradients_stamp(const lg_region *r)
{
    return &((struct lg_gradients_front *)r->front)->stamp;
}

/* That are given away in a step. */
static inline uint64_t lg_gradients_units(const lg_gradients *g)
{
    return (uint64_t)g->ring.units * g->micros;
}
