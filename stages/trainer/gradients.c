/* FORWARD: where a step's gradients are written and when they are given away; gradients.h has the rules.
 *
 * While they are scattered the device has work for one unit more than what has been given away, so that it does not wait
 * for this thread. */
#include "stages/trainer/gradients_private.h"

static uint64_t given_of_step(const lg_gradients *g, uint64_t step)
{
    return lg_scatter_count(lg_scatter_given(g->st->board, g->me), step, lg_gradients_units(g));
}

uint64_t lg_gradients_next_micro(const lg_gradients *g, uint64_t step)
{
    return g->scatters ? given_of_step(g, step) / (uint64_t)g->ring.units : 0;
}

int lg_gradients_begin(lg_gradients *g, uint64_t step, uint64_t from, uint64_t *ret_micro,
                       struct lg_loss_sum *ret_loss)
{
    g->step = step;
    g->pending = LG_GRADIENTS_NOTHING;
    *ret_micro = LG_MIN(from, lg_gradients_next_micro(g, step));
    *ret_loss = lg_scatter_loss(g->st->board, g->me, *ret_micro);
    if (!g->scatters) {
        lg_stamp_clear(lg_gradients_stamp(g->grad[g->me]));
        return 0;
    }
    if (given_of_step(g, step)) return lg_stage_expect(g->st, g->grad[g->me], step);
    lg_stamp_set(lg_gradients_stamp(g->grad[g->me]), step);
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
    const uint64_t need =
        lg_scatter_number(g->step, n - (uint64_t)u->back + 1, lg_gradients_units(g));
    return lg_scatter_added_by_all(g->st->board) >= need;
}

static void zero_untouched(lg_gradients *g, int unit, float *at)
{
    const struct lg_param_unit *u = &g->state->params.unit[unit];
    for (size_t i = 0; i < g->n_untouched; i++) {
        const struct lg_gradients_range *r = &g->untouched[i];
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
    if (g->pending == LG_GRADIENTS_NOTHING) return;
    const uint64_t n =
        g->micro * (uint64_t)g->ring.units + (uint64_t)g->ring.unit[g->pending].order;
    lg_event_sync(g->event[g->pending_event]);
    g->pending = LG_GRADIENTS_NOTHING;
    lg_scatter_mark_given(g->st->board, g->me,
                          lg_scatter_number(g->step, n + 1, lg_gradients_units(g)));
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
    lg_stamp_set(lg_gradients_stamp(g->grad[g->me]), g->step);
}

int lg_gradients_expect(lg_gradients *g, uint64_t step, struct lg_loss_sum *ret_loss)
{
    *ret_loss = lg_scatter_loss(g->st->board, g->me, g->micros);
    return lg_stage_expect(g->st, g->grad[g->me], step);
}
