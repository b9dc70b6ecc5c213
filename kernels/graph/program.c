/* Running a program; see program.h. */
#include "base/check.h"
#include "kernels/graph/program_private.h"
#include <stdlib.h>

void lg_program_free(lg_program **program)
{
    lg_program *p = *program;
    if (!p) return;
    free(p->value);
    free(p->node);
    free(p->args);
    free(p->place);
    free(p);
    *program = NULL;
}

size_t lg_program_arena_bytes(const lg_program *p)
{
    return p->arena_bytes;
}

size_t lg_program_scratch_bytes(const lg_program *p)
{
    return p->scratch_bytes;
}

void lg_program_run(lg_program *p, lg_stream *s, const struct lg_program_memory *m)
{
    LG_ASSERT(!lg_stream_is_dry(s) && (m->arena || !p->arena_bytes));
    lg_stream_set_scratch(s, m->scratch, p->scratch_bytes);
    for (int i = 0; i < p->n_places; i++) {
        const struct lg_place *l = &p->place[i];
        void *base = l->bound < 0 ? m->arena : m->bound[l->bound];
        LG_ASSERT(base);
        lg_place_pointer(p, i, (char *)base + l->offset);
    }
    for (int n = 0; n < p->n_nodes; n++) lg_op_call(s, p->node[n].op, p->args + p->node[n].args);
}
