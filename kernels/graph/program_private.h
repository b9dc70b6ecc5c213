/* A program's parts. Only kernels/graph includes this. */
#pragma once
#include "base/check.h"
#include "base/lifetimes.h"
#include "kernels/graph/graph_private.h"
#include "kernels/graph/program.h"

enum { LG_PLACE_ARENA = -1, LG_PLACE_EXCHANGED = -2, LG_PLACE_LENT = -3 };
/* A tensor of a call: `offset` bytes behind the arena's start, or that of what is bound. */
struct lg_place {
    size_t tensor; /* the lg_tensor, in bytes from the start of args */
    int bound;     /* or one of these: */
    size_t offset;
    int node, value, element;
    const struct lg_operand *operand;
    size_t in_value; /* offset in it */
};

struct lg_placed {
    struct lg_value of;
    int storage; /* the value whose memory it has; its own number: its own */
    int where;   /* LG_PLACE_*; of one that is bound nothing */
    size_t at;   /* in that memory */
};

struct lg_input_place {
    int where; /* LG_PLACE_* */
    size_t at; /* LG_NO_PLACE: it has none */
};

struct lg_program {
    struct lg_placed *value;
    int n_values, n_bound;
    struct lg_node *node;
    int n_nodes;
    char *args;
    struct lg_place *place;
    int n_places;
    int *first_place; /* [n_nodes + 1]: of each node */
    size_t *toggle;   /* bools in args that a run sets: add, or overwrite */
    int n_toggles;
    size_t arena_bytes, scratch_bytes, exchanged_bytes, lent_bytes;
    struct lg_input_place (*input)[2]; /* [n_bound], or NULL: in forward and backward */
    int n_copies;
    size_t host_bytes;
    lg_stream *out, *in;      /* the lanes of copies; NULL until they are opened */
    lg_event **begun, **done; /* [n_copies]: of the computation, of the lane */
};

static inline void lg_program_toggle(lg_program *p, bool add)
{
    for (int i = 0; i < p->n_toggles; i++) *(bool *)(p->args + p->toggle[i]) = add;
}

static inline void lg_place_pointer(lg_program *p, int i, void *at)
{
    ((lg_tensor *)(void *)(p->args + p->place[i].tensor))->data = at;
}

/* From where the offset of a place counts in a run. */
static inline void *lg_program_base(const struct lg_program_memory *m, int bound)
{
    void *base = bound == LG_PLACE_ARENA       ? m->arena
                 : bound == LG_PLACE_EXCHANGED ? m->exchanged
                 : bound == LG_PLACE_LENT      ? m->lent
                                               : m->bound[bound];
    LG_ASSERT(base);
    return base;
}
