/* The own shard of the sum of all ranks' gradients, and its squares; gradients.h has the rules.
 *
 * A rank reads the others' gradients across GPUs as it adds them. While they are scattered additions have a stream of
 * their own. */
#include "stages/trainer/gradients_private.h"

static struct lg_piece own_piece(const lg_gradients *g, int unit)
{
    return lg_trainer_piece(g->state, g->me, unit);
}

/* Where the sum lies after so many micro-batches. */
static float *sum_after(const lg_gradients *g, uint64_t micros)
{
    const size_t side = g->micros > 1 ? micros & 1 : 0;
    return (float *)g->sum->payload + side * lg_trainer_shard(g->state, g->me);
}

static struct lg_reduce_ranks_args reduction(const lg_gradients *g, struct lg_piece p, float *to)
{
    return (struct lg_reduce_ranks_args){.y = lg_t1(to + p.at, LG_F32, (int64_t)p.count),
                                         .squares =
                                             lg_t1(g->squares + lg_gradients_squares(p.at), LG_F64,
                                                   (int64_t)lg_gradients_squares(p.count))};
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

/* ---- scattered: while FORWARD goes on ---- */

int lg_gradients_add(lg_gradients *g)
{
    if (!g->scatters) return 0;
    lg_board *b = g->st->board;
    const uint64_t added = lg_scatter_added(b, g->me), given = lg_scatter_given_by_all(b);
    if (added >= given) return 0;
    /* Both are of one step, or of its end. */
    const uint64_t step = added >> LG_SCATTER_STEP_BITS, all = lg_gradients_units(g);
    const uint64_t from = lg_scatter_count(added, step, all),
                   to = lg_scatter_count(given, step, all);
    for (int r = 0; r < g->ranks; r++) LG_TRY(lg_stage_expect(g->st, g->grad[r], step));
    if (from) LG_TRY(lg_stage_expect(g->st, g->sum, step));
    const uint64_t last = (g->micros - 1) * (uint64_t)g->ring.units;
    lg_stamp_set(lg_gradients_stamp(g->sum), step);
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

/* ---- REDUCE, TOTAL ---- */

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
    const size_t squares = lg_gradients_squares(lg_trainer_shard(g->state, g->me));
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
