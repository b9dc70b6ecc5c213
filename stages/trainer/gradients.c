/* Gradients of a step; gradients.h has the rules.
 *
 * A rank reads the others' gradients across GPUs as it adds them. While they are scattered the device has work for one
 * unit more than what has been given away, so that it does not wait for this thread; additions have a stream of their
 * own. */
#include "stages/trainer/gradients.h"
#include "kernels/ops.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { NOTHING = -1 };

struct range {
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
    char *made;              /* where the backward writes: the own region, or memory cut like it */
    struct range *untouched; /* what no backward writes: gaps, in order */
    size_t n_untouched;
    float *sink;    /* where units go that are given already */
    float *reduced; /* (shard): whole gradients of several ranks, added up */
    float *staged;  /* (shard): LG_HOST_WAY_STAGED: what goes to the other hosts, what came */
    double *squares, *host_squares; // (pieces of the shard), device and host
    lg_mark *squares_of;            /* [units]: the step whose squares lie there */
    lg_event *event[2];
    int pending, pending_event; /* a unit that is done, but not given; NOTHING: none */
    uint64_t step, micro;
    uint64_t given_before; /* units of this micro-batch that a former life has given */
};

/* ---- memory ---- */

static size_t squares_count(size_t count)
{
    return (count + LG_SQUARES_PIECE - 1) / LG_SQUARES_PIECE;
}

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
    struct lg_gradients_bytes b = {.own = squares_count(shard) * sizeof(double)};
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
    g->untouched[g->n_untouched++] = (struct range){first, end - first};
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
    LG_TRY(alloc(g->device, squares_count(shard) * sizeof(double), &g->squares));
    g->host_squares = calloc(squares_count(shard) + 1, sizeof(double));
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
                        .pending = NOTHING};
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

static struct lg_stamp *stamp_of(const lg_region *r)
{
    return &((struct lg_gradients_front *)r->front)->stamp;
}

static struct lg_piece own_piece(const lg_gradients *g, int unit)
{
    return lg_trainer_piece(g->state, g->me, unit);
}

/* ---- FORWARD ---- */

static uint64_t units_of_step(const lg_gradients *g)
{
    return (uint64_t)g->ring.units * g->micros;
}

static uint64_t given_of_step(const lg_gradients *g, uint64_t step)
{
    return lg_scatter_count(lg_scatter_given(g->st->board, g->me), step, units_of_step(g));
}

uint64_t lg_gradients_next_micro(const lg_gradients *g, uint64_t step)
{
    return g->scatters ? given_of_step(g, step) / (uint64_t)g->ring.units : 0;
}

int lg_gradients_begin(lg_gradients *g, uint64_t step, uint64_t from, uint64_t *ret_micro,
                       struct lg_loss_sum *ret_loss)
{
    g->step = step;
    g->pending = NOTHING;
    *ret_micro = LG_MIN(from, lg_gradients_next_micro(g, step));
    *ret_loss = lg_scatter_loss(g->st->board, g->me, *ret_micro);
    if (!g->scatters) {
        lg_stamp_clear(stamp_of(g->grad[g->me]));
        return 0;
    }
    if (given_of_step(g, step)) return lg_stage_expect(g->st, g->grad[g->me], step);
    lg_stamp_set(stamp_of(g->grad[g->me]), step);
    return 0;
}

void lg_gradients_begin_micro(lg_gradients *g, uint64_t micro)
{
    g->micro = micro;
    if (!g->scatters) return;
    const uint64_t first = micro * (uint64_t)g->ring.units;
    const uint64_t given = given_of_step(g, g->step);
    LG_ASSERT(given >= first);
    g->given_before = LG_MIN(given - first, (uint64_t)g->ring.units);
}

bool lg_gradients_accumulate(const lg_gradients *g)
{
    return !g->scatters && g->micro > 0;
}

/* Is everybody done with what lies where the unit's gradient goes? */
static bool is_free(const lg_gradients *g, const struct lg_ring_unit *u)
{
    const uint64_t n = g->micro * (uint64_t)g->ring.units + (uint64_t)u->order;
    if (n < (uint64_t)u->back) return true; /* that of another step */
    const uint64_t need = lg_scatter_number(g->step, n - (uint64_t)u->back + 1, units_of_step(g));
    return lg_scatter_added_by_all(g->st->board) >= need;
}

static void zero_untouched(lg_gradients *g, int unit, float *at)
{
    const struct lg_param_unit *u = &g->state->params.unit[unit];
    for (size_t i = 0; i < g->n_untouched; i++) {
        const struct range *r = &g->untouched[i];
        if (r->first >= u->first && r->first - u->first < u->count)
            lg_stream_zero(g->compute, at + (r->first - u->first), r->count * sizeof *at);
    }
}

/* Of a unit's gradient, in a region and in what is cut like it: bytes. */
static size_t offset_of(const lg_gradients *g, int unit)
{
    return g->scatters ? g->ring.unit[unit].at : g->state->params.unit[unit].first * sizeof(float);
}

bool lg_gradients_place(lg_gradients *g, int unit, float **ret)
{
    if (!g->scatters) {
        *ret = (float *)(g->made + offset_of(g, unit));
        return true;
    }
    const struct lg_ring_unit *u = &g->ring.unit[unit];
    if ((uint64_t)u->order < g->given_before) {
        *ret = g->sink;
        return true;
    }
    if (!is_free(g, u)) return false;
    *ret = (float *)(g->made + offset_of(g, unit));
    zero_untouched(g, unit, *ret);
    return true;
}

static void give(lg_gradients *g)
{
    if (g->pending == NOTHING) return;
    const uint64_t n =
        g->micro * (uint64_t)g->ring.units + (uint64_t)g->ring.unit[g->pending].order;
    lg_event_sync(g->event[g->pending_event]);
    g->pending = NOTHING;
    lg_scatter_mark_given(g->st->board, g->me, lg_scatter_number(g->step, n + 1, units_of_step(g)));
    lg_bus_notify(g->st->bus);
}

/* Behind what `event` marks, which then is behind the copy. */
static void bring(lg_gradients *g, int unit, lg_event *event)
{
    const size_t at = offset_of(g, unit);
    lg_stream_wait(g->lane, event);
    lg_stream_copy(g->lane, (char *)g->grad[g->me]->payload + at, g->made + at,
                   g->state->params.unit[unit].count * sizeof(float));
    lg_stream_record(g->lane, event);
}

/* Whole ones of several micro-batches are brought when the last has been added. */
static bool is_whole(const lg_gradients *g, int unit)
{
    if (!g->scatters) return g->lane && g->micro + 1 == g->micros;
    return (uint64_t)g->ring.unit[unit].order >= g->given_before;
}

void lg_gradients_done(lg_gradients *g, int unit)
{
    if (!is_whole(g, unit)) return;
    const int next = 1 - g->pending_event;
    lg_stream_record(g->compute, g->event[next]);
    if (g->lane) bring(g, unit, g->event[next]);
    if (!g->scatters) return;
    give(g);
    g->pending = unit;
    g->pending_event = next;
}

void lg_gradients_flush(lg_gradients *g)
{
    give(g);
}

void lg_gradients_end_micro(lg_gradients *g, struct lg_loss_sum loss_sum)
{
    lg_scatter_keep_loss(g->st->board, g->me, g->micro + 1, loss_sum);
    give(g);
}

void lg_gradients_end(lg_gradients *g)
{
    if (g->scatters) return;
    if (g->lane) lg_stream_sync(g->lane);
    lg_stamp_set(stamp_of(g->grad[g->me]), g->step);
}

int lg_gradients_expect(lg_gradients *g, uint64_t step, struct lg_loss_sum *ret_loss)
{
    *ret_loss = lg_scatter_loss(g->st->board, g->me, g->micros);
    return lg_stage_expect(g->st, g->grad[g->me], step);
}

/* ---- sums ---- */

/* Where the sum lies after so many micro-batches. */
static float *sum_after(const lg_gradients *g, uint64_t micros)
{
    const size_t side = g->micros > 1 ? micros & 1 : 0;
    return (float *)g->sum->payload + side * lg_trainer_shard(g->state, g->me);
}

static struct lg_reduce_ranks_args reduction(const lg_gradients *g, struct lg_piece p, float *to)
{
    return (struct lg_reduce_ranks_args){.y = lg_t1(to + p.at, LG_F32, (int64_t)p.count),
                                         .squares = lg_t1(g->squares + squares_count(p.at), LG_F64,
                                                          (int64_t)squares_count(p.count))};
}

static void add_part(struct lg_reduce_ranks_args *a, const float *x)
{
    a->x[a->count++] = lg_t1((void *)x, LG_F32, a->y.dim[0]);
}

/* The own piece of unit number n of the step, of all ranks. */
static void add_unit(lg_gradients *g, uint64_t step, uint64_t n)
{
    const uint64_t micro = n / (uint64_t)g->ring.units;
    const int unit = g->ring.by_order[n % (uint64_t)g->ring.units];
    const struct lg_piece p = own_piece(g, unit);
    const size_t in_unit = p.first - g->state->params.unit[unit].first;
    if (!p.count) return;
    struct lg_reduce_ranks_args a = reduction(g, p, sum_after(g, micro + 1));
    if (micro) add_part(&a, sum_after(g, micro) + p.at);
    for (int r = 0; r < g->ranks; r++)
        add_part(&a, (const float *)((const char *)g->grad[r]->payload + g->ring.unit[unit].at) +
                         in_unit);
    lg_reduce_ranks(g->adder, &a);
    g->squares_of[unit] = micro + 1 == g->micros ? lg_mark_of(step) : LG_MARK_NONE;
}

/* ---- to the other hosts ---- */

static struct lg_outgoing_front *outgoing_front(const lg_gradients *g)
{
    return g->host.outgoing->front;
}

/* What was added of the last micro-batch goes, behind the additions. */
static void bring_out(lg_gradients *g, int unit)
{
    const struct lg_piece p = own_piece(g, unit);
    lg_stream_copy(g->adder, (float *)g->host.outgoing->payload + p.at,
                   sum_after(g, g->micros) + p.at, p.count * sizeof(float));
}

/* Elements at the shard's end that so many units of the last micro-batch make whole. */
static size_t whole_at_end(const lg_gradients *g, uint64_t units)
{
    size_t rest = 0;
    for (uint64_t n = units; n < (uint64_t)g->ring.units; n++) {
        const struct lg_piece p = own_piece(g, g->ring.by_order[n]);
        if (p.count) rest = LG_MAX(rest, p.at + p.count);
    }
    return lg_trainer_shard(g->state, g->me) - rest;
}

/* After `added` units of the step, of all micro-batches. */
static void tell_leaving(lg_gradients *g, uint64_t step, uint64_t added)
{
    const uint64_t before = (g->micros - 1) * (uint64_t)g->ring.units;
    if (!g->host.outgoing || added <= before) return;
    lg_leaving_mark(&outgoing_front(g)->leaving, step, whole_at_end(g, added - before));
}

int lg_gradients_add(lg_gradients *g)
{
    if (!g->scatters) return 0;
    lg_board *b = g->st->board;
    const uint64_t added = lg_scatter_added(b, g->me), given = lg_scatter_given_by_all(b);
    if (added >= given) return 0;
    /* Both are of one step, or of its end. */
    const uint64_t step = added >> LG_SCATTER_STEP_BITS, all = units_of_step(g);
    const uint64_t from = lg_scatter_count(added, step, all),
                   to = lg_scatter_count(given, step, all);
    for (int r = 0; r < g->ranks; r++) LG_TRY(lg_stage_expect(g->st, g->grad[r], step));
    if (from) LG_TRY(lg_stage_expect(g->st, g->sum, step));
    const uint64_t last = (g->micros - 1) * (uint64_t)g->ring.units;
    lg_stamp_set(stamp_of(g->sum), step);
    if (g->host.outgoing && to > last) lg_stamp_set(&outgoing_front(g)->stamp, step);
    for (uint64_t n = from; n < to; n++) {
        add_unit(g, step, n);
        if (g->host.outgoing && n >= last) bring_out(g, g->ring.by_order[n - last]);
    }
    lg_stream_sync(g->adder);
    lg_scatter_mark_added(b, g->me, given);
    tell_leaving(g, step, to);
    lg_bus_notify(g->st->bus);
    return 1;
}

/* Where REDUCE leaves the shard. */
static float *reduced_to(const lg_gradients *g)
{
    if (g->staged) return g->staged;
    if (g->host.outgoing) return g->host.outgoing->payload;
    if (g->scatters) return sum_after(g, g->micros);
    return g->reduced ? g->reduced : g->grad[g->me]->payload;
}

static void reduce_whole(lg_gradients *g, struct lg_piece p)
{
    struct lg_reduce_ranks_args a = reduction(g, p, reduced_to(g));
    for (int r = 0; r < g->ranks; r++) add_part(&a, (const float *)g->grad[r]->payload + p.first);
    lg_reduce_ranks(g->compute, &a);
}

/* The sum is there; its squares are too, unless a former life has added it. */
static void reduce_scattered(lg_gradients *g, int unit, struct lg_piece p)
{
    if (g->squares_of[unit] == lg_mark_of(g->step)) return;
    struct lg_reduce_ranks_args a = reduction(g, p, reduced_to(g));
    add_part(&a, sum_after(g, g->micros) + p.at);
    lg_reduce_ranks(g->compute, &a);
}

/* The sum over all hosts is there. */
static void take_squares(lg_gradients *g, struct lg_piece p)
{
    struct lg_reduce_ranks_args a = reduction(g, p, lg_gradients_sum(g));
    add_part(&a, a.y.data);
    lg_reduce_ranks(g->compute, &a);
}

/* Of each unit, with squares of all. */
static void reduce_units(lg_gradients *g, bool total, struct lg_exact_sum *ret_squares)
{
    const size_t squares = squares_count(lg_trainer_shard(g->state, g->me));
    *ret_squares = (struct lg_exact_sum){0};
    if (!squares) return;
    const size_t bytes = lg_trainer_shard(g->state, g->me) * sizeof(float);
    lg_turn_begin(&g->st->turn);
    if (g->staged && total) lg_stream_copy(g->compute, g->staged, g->host.incoming->payload, bytes);
    for (int u = 0; u < g->state->params.n_units; u++) {
        struct lg_piece p = own_piece(g, u);
        if (!p.count) continue;
        if (total)
            take_squares(g, p);
        else if (g->scatters)
            reduce_scattered(g, u, p);
        else
            reduce_whole(g, p);
    }
    if (g->staged && !total)
        lg_stream_copy(g->compute, g->host.outgoing->payload, g->staged, bytes);
    lg_stream_download(g->compute, g->host_squares, g->squares, squares * sizeof(double));
    lg_stream_sync(g->compute);
    lg_turn_end(&g->st->turn);
    for (size_t i = 0; i < squares; i++) lg_exact_sum_add(ret_squares, g->host_squares[i]);
}

int lg_gradients_reduce(lg_gradients *g, uint64_t step, struct lg_exact_sum *ret_squares)
{
    g->step = step;
    if (g->scatters) LG_TRY(lg_stage_expect(g->st, g->sum, step));
    if (g->scatters && g->host.outgoing) { /* it has left while it was added */
        LG_TRY(lg_stage_expect(g->st, g->host.outgoing, step));
        *ret_squares = (struct lg_exact_sum){0};
        return 0;
    }
    for (int r = 0; r < g->ranks && !g->scatters; r++)
        LG_TRY(lg_stage_expect(g->st, g->grad[r], step));
    reduce_units(g, false, ret_squares);
    if (g->host.outgoing) lg_stamp_set(g->host.outgoing->front, step);
    return 0;
}

int lg_gradients_total(lg_gradients *g, uint64_t step, struct lg_exact_sum *ret_squares)
{
    LG_TRY(lg_stage_expect(g->st, g->host.incoming, step));
    reduce_units(g, true, ret_squares);
    return 0;
}

float *lg_gradients_sum(const lg_gradients *g)
{
    return g->host.incoming && !g->staged ? g->host.incoming->payload : reduced_to(g);
}
