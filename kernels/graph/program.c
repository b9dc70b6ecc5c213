/* Running a program; see program.h. */
#include "base/check.h"
#include "kernels/graph/program_private.h"
#include <stdlib.h>

void lg_program_free(lg_program **program)
{
    lg_program *p = *program;
    if (!p) return;
    lg_stream_close(&p->out);
    lg_stream_close(&p->in);
    for (int i = 0; i < p->n_copies && p->begun; i++) lg_event_close(&p->begun[i]);
    for (int i = 0; i < p->n_copies && p->done; i++) lg_event_close(&p->done[i]);
    free(p->begun);
    free(p->done);
    free(p->value);
    free(p->node);
    free(p->args);
    free(p->place);
    free(p->first_place);
    free(p->toggle);
    free(p->input);
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

size_t lg_program_lent_bytes(const lg_program *p)
{
    return p->lent_bytes;
}

void *lg_program_input_at(const lg_program *p, const struct lg_program_memory *m, int bound,
                          bool backward)
{
    LG_ASSERT(p->input && bound >= 0 && bound < p->n_bound);
    const struct lg_input_place *i = &p->input[bound][backward];
    LG_ASSERT(i->at != LG_NO_PLACE);
    return (char *)lg_program_base(m, i->where) + i->at;
}

size_t lg_program_host_bytes(const lg_program *p)
{
    return p->host_bytes;
}

int lg_program_open_lanes(lg_program *p, lg_device *d)
{
    if (!p->n_copies) return 0;
    LG_ASSERT(!p->out);
    p->begun = calloc((size_t)p->n_copies, sizeof(lg_event *));
    p->done = calloc((size_t)p->n_copies, sizeof(lg_event *));
    LG_ASSERT(p->begun && p->done);
    LG_TRY(lg_stream_open(d, &p->out));
    LG_TRY(lg_stream_open(d, &p->in));
    for (int i = 0; i < p->n_copies; i++) {
        LG_TRY(lg_event_open(d, &p->begun[i]));
        LG_TRY(lg_event_open(d, &p->done[i]));
    }
    return 0;
}

/* A lane starts a copy when the computation has come to this node, and runs on beside it. */
static void copy(lg_program *p, lg_stream *s, const struct lg_program_memory *m, int node)
{
    const struct lg_copy_args *a = (const void *)(p->args + p->node[node].args);
    const enum lg_node_kind kind = p->node[node].kind;
    const bool out = kind == LG_NODE_OUT;
    void *host = (char *)m->host + a->host_at;
    LG_ASSERT(p->out && m->host);
    if (kind == LG_NODE_OUT_DONE || kind == LG_NODE_IN_DONE) {
        lg_stream_wait(s, p->done[a->copy]);
        return;
    }
    lg_stream *lane = out ? p->out : p->in;
    lg_stream_record(s, p->begun[a->copy]);
    lg_stream_wait(lane, p->begun[a->copy]);
    if (out)
        lg_stream_download(lane, host, a->t.data, lg_tensor_bytes(&a->t));
    else
        lg_stream_upload(lane, a->t.data, host, lg_tensor_bytes(&a->t));
    lg_stream_record(lane, p->done[a->copy]);
}

static void zero(lg_stream *s, const struct lg_program_memory *m, const struct lg_copy_args *a)
{
    if (a->is_value || !m->add) lg_stream_zero(s, a->t.data, lg_tensor_bytes(&a->t));
}

static void run_node(lg_program *p, lg_stream *s, const struct lg_program_memory *m, int node)
{
    const struct lg_node *n = &p->node[node];
    for (int i = p->first_place[node]; i < p->first_place[node + 1]; i++)
        lg_place_pointer(p, i, (char *)lg_program_base(m, p->place[i].bound) + p->place[i].offset);
    switch (n->kind) {
    case LG_NODE_CALL:
        lg_op_call(s, n->op, p->args + n->args);
        break;
    case LG_NODE_ZERO:
        zero(s, m, (const void *)(p->args + n->args));
        break;
    default:
        LG_ASSERT(n->kind != LG_NODE_EXCHANGE); /* the caller's */
        copy(p, s, m, node);
    }
}

int lg_program_nodes(const lg_program *p, enum lg_program_part part)
{
    int n = 0;
    for (int i = 0; i < p->n_nodes; i++)
        n += (part & (p->node[i].backward ? LG_PROGRAM_BACKWARD : LG_PROGRAM_FORWARD)) != 0;
    return n;
}

struct lg_node_range lg_program_uses(const lg_program *p, int bound, enum lg_program_part part)
{
    struct lg_node_range r = {0, 0};
    for (int n = 0; n < p->n_nodes; n++) {
        if (!(part & (p->node[n].backward ? LG_PROGRAM_BACKWARD : LG_PROGRAM_FORWARD))) continue;
        for (int i = p->first_place[n]; i < p->first_place[n + 1]; i++) {
            if (p->place[i].bound != bound) continue;
            if (!r.end) r.first = n;
            r.end = n + 1;
        }
    }
    return r;
}

void lg_program_run_nodes(lg_program *p, lg_stream *s, const struct lg_program_memory *m, int from,
                          int to)
{
    LG_ASSERT(!lg_stream_is_dry(s) && (m->arena || !p->arena_bytes));
    LG_ASSERT(from >= 0 && to <= p->n_nodes);
    LG_ASSERT(!p->lent_bytes || (m->lent && !m->add)); /* what is added to would be gone */
    lg_stream_set_scratch(s, m->scratch, p->scratch_bytes);
    lg_program_toggle(p, m->add);
    for (int n = from; n < to; n++) run_node(p, s, m, n);
}

void lg_program_run(lg_program *p, lg_stream *s, const struct lg_program_memory *m,
                    enum lg_program_part part)
{
    const int forward = lg_program_nodes(p, LG_PROGRAM_FORWARD);
    lg_program_run_nodes(p, s, m, part & LG_PROGRAM_FORWARD ? 0 : forward,
                         part & LG_PROGRAM_BACKWARD ? p->n_nodes : forward);
}
