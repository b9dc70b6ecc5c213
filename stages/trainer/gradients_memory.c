/* Memory of gradients: its bytes, its regions, what is closed again; gradients.h has the rules. */
#include "stages/trainer/gradients_private.h"
#include <stdlib.h>
#include <string.h>

static uint64_t micros_of(const lg_plan *p)
{
    return (uint64_t)(p->rank_batch / p->micro_batch);
}

/* Do others read them, and cannot reach this device? */
static bool is_apart(const lg_plan *p)
{
    return p->apart && p->instances[LG_ROLE_trainer] > 1;
}

struct lg_gradients_bytes lg_gradients_bytes_of(const lg_plan *p, const lg_params *t,
                                                const lg_denoiser *net, size_t shard)
{
    struct lg_gradients_bytes b = {.own = lg_gradients_squares(shard) * sizeof(double)};
    if (p->hosts > 1) b.host = b.staged = shard * sizeof(float);
    if (!p->scatters) {
        b.grad = t->count * sizeof(float);
        if (p->hosts < 2 && p->instances[LG_ROLE_trainer] > 1) b.own += shard * sizeof(float);
        if (is_apart(p)) b.own += b.grad;
        return b;
    }
    struct lg_ring ring;
    lg_ring_plan(t, net, &ring);
    b.grad = ring.bytes;
    b.sum = LG_MAX(shard, (size_t)1) * sizeof(float) * (micros_of(p) > 1 ? 2 : 1);
    b.own += ring.largest + (is_apart(p) ? ring.bytes : 0);
    lg_ring_free(&ring);
    return b;
}

bool lg_gradients_lends(const lg_plan *p)
{
    return !p->scatters && micros_of(p) == 1;
}

void *lg_gradients_lent(const lg_gradients *g)
{
    return g->made;
}

lg_host_way lg_host_way_of(const lg_config *c)
{
    if (strcmp(c->_device, "cuda") != 0) return LG_HOST_WAY_HERE;
    return strcmp(c->hosts_transport, "nccl") ? LG_HOST_WAY_STAGED : LG_HOST_WAY_ON_GPU;
}

int lg_host_gradients_open(lg_stage *st, lg_device *d, const lg_trainer_state *s,
                           struct lg_host_gradients *ret)
{
    const bool on_gpu = lg_host_way_of(st->config) == LG_HOST_WAY_ON_GPU;
    struct {
        const char *name;
        lg_region **to;
    } part[] = {{"outgoing", &ret->outgoing}, {"incoming", &ret->incoming}};
    ret->count = lg_trainer_shard(s, st->index);
    for (size_t i = 0; i < LG_ARRAY_LEN(part); i++)
        LG_TRY(lg_stage_region(
            st,
            &(struct lg_stage_memory){.bytes = LG_MAX(ret->count, (size_t)1) * sizeof(float),
                                      .front_bytes = i ? sizeof(struct lg_stamp)
                                                       : sizeof(struct lg_outgoing_front),
                                      .device = d,
                                      .role = LG_ROLE_trainer,
                                      .index = st->index,
                                      .is_made = lg_trainer_began(st->board),
                                      .is_with_host = !on_gpu},
            part[i].to, "trainer/%d/%s", st->index, part[i].name));
    return 0;
}

static int open_regions(lg_gradients *g, struct lg_gradients_bytes b)
{
    for (int r = 0; r < g->ranks; r++) {
        struct lg_stage_memory m = {.bytes = b.grad,
                                    .front_bytes = sizeof(struct lg_gradients_front),
                                    .device = g->device,
                                    .role = LG_ROLE_trainer,
                                    .index = r,
                                    .is_made = lg_trainer_began(g->st->board),
                                    .is_handed = is_apart(&g->st->plan)};
        LG_TRY(lg_stage_region(g->st, &m, &g->grad[r], "trainer/%d/grad", r));
        m.bytes = b.sum;
        m.is_handed = false;
        m.is_made = atomic_load_explicit(&g->st->row->commit, memory_order_acquire) !=
                    LG_MARK_NONE; /* nobody else opens it */
        if (r == g->me && b.sum) LG_TRY(lg_stage_region(g->st, &m, &g->sum, "trainer/%d/sum", r));
    }
    g->made = g->grad[g->me]->payload;
    if (!is_apart(&g->st->plan)) return 0;
    void *made;
    LG_TRY(lg_device_alloc(g->device, LG_MAX(b.grad, (size_t)1), &made));
    g->made = made;
    LG_TRY(lg_stream_open(g->device, &g->lane));
    return 0;
}

/* Every rank's ring is cut as this build cuts it. */
static int check_rings(lg_gradients *g)
{
    for (int r = 0; r < g->ranks; r++) {
        struct lg_gradients_front *front = g->grad[r]->front;
        uint64_t there = 0;
        if (!atomic_compare_exchange_strong(&front->ring, &there, g->ring.hash) &&
            there != g->ring.hash)
            return LG_FAIL(LG_ERR_MISMATCH,
                           "the gradients of rank %d leave in another order than this program's: "
                           "it was built from other sources; stop the run and start it again",
                           r);
    }
    return 0;
}

static void add_range(lg_gradients *g, size_t first, size_t end)
{
    if (first >= end) return;
    if (!(g->n_untouched & (g->n_untouched - 1))) {
        size_t room = LG_MAX(2 * g->n_untouched, (size_t)1);
        g->untouched = realloc(g->untouched, room * sizeof *g->untouched);
        LG_ASSERT(g->untouched);
    }
    g->untouched[g->n_untouched++] = (struct lg_gradients_range){first, end - first};
}

static void find_untouched(lg_gradients *g)
{
    const lg_params *t = &g->state->params;
    for (int u = 0; u < t->n_units; u++) {
        size_t at = t->unit[u].first, end = at + t->unit[u].count;
        for (int i = 0; i < t->n; i++) {
            const struct lg_param *p = &t->p[i];
            if (p->offset < at || p->offset >= end) continue;
            add_range(g, at, p->offset);
            at = p->offset + p->count;
        }
        add_range(g, at, end);
    }
}

static int alloc(lg_device *d, size_t bytes, void *ret_pointer)
{
    void *p = NULL;
    if (bytes) LG_TRY(lg_device_alloc(d, bytes, &p));
    memcpy(ret_pointer, &p, sizeof p);
    return 0;
}

static int open_memory(lg_gradients *g, const lg_denoiser *net)
{
    const lg_params *t = &g->state->params;
    const size_t shard = lg_trainer_shard(g->state, g->me);
    if (lg_hosts_are_several(g->st->board)) {
        LG_TRY(lg_host_gradients_open(g->st, g->device, g->state, &g->host));
        if (lg_host_way_of(g->st->config) == LG_HOST_WAY_STAGED)
            LG_TRY(alloc(g->device, LG_MAX(shard, (size_t)1) * sizeof(float), &g->staged));
    }
    LG_TRY(open_regions(g, lg_gradients_bytes_of(&g->st->plan, t, net, shard)));
    LG_TRY(alloc(g->device, lg_gradients_squares(shard) * sizeof(double), &g->squares));
    g->host_squares = calloc(lg_gradients_squares(shard) + 1, sizeof(double));
    g->squares_of = calloc((size_t)t->n_units, sizeof *g->squares_of);
    LG_ASSERT(g->host_squares && g->squares_of);
    for (int i = 0; i < 2; i++) LG_TRY(lg_event_open(g->device, &g->event[i]));
    if (!g->scatters)
        return alloc(g->device, g->ranks > 1 && !g->host.outgoing ? shard * sizeof(float) : 0,
                     &g->reduced);
    lg_ring_plan(t, net, &g->ring);
    LG_TRY(check_rings(g));
    find_untouched(g);
    LG_TRY(alloc(g->device, g->ring.largest, &g->sink));
    LG_TRY(lg_stream_open(g->device, &g->adder));
    return 0;
}

int lg_gradients_open(lg_stage *st, lg_device *d, lg_stream *compute, const lg_trainer_state *s,
                      const lg_denoiser *net, lg_gradients **ret)
{
    lg_gradients *g = calloc(1, sizeof *g);
    LG_ASSERT(g);
    *ret = g; /* half-built objects may be closed */
    *g = (lg_gradients){.st = st,
                        .device = d,
                        .compute = compute,
                        .state = s,
                        .me = st->index,
                        .ranks = s->ranks,
                        .scatters = st->plan.scatters,
                        .micros = micros_of(&st->plan),
                        .pending = LG_GRADIENTS_NOTHING};
    return open_memory(g, net);
}

void lg_gradients_close(lg_gradients **ret)
{
    lg_gradients *g = *ret;
    if (!g) return;
    for (int i = 0; i < 2; i++) lg_event_close(&g->event[i]);
    lg_stream_close(&g->adder);
    lg_stream_close(&g->lane);
    lg_ring_free(&g->ring);
    free(g->untouched);
    free(g->host_squares);
    free(g->squares_of);
    free(g);
    *ret = NULL;
}
