/* Places of gradients on their way; see ring.h. */
#include "stages/trainer/ring.h"
#include "base/fs.h"
#include "base/lifetimes.h"
#include <stdlib.h>

enum { RING_LAG = 2 };

/* The order, and from which event to which each place is needed. */
static void find_lifetimes(const lg_params *t, const lg_denoiser *net, struct lg_ring *r,
                           struct lg_lifetime *l)
{
    int n, n_forward, done = 0;
    const struct lg_denoiser_event *e = lg_denoiser_events(net, &n, &n_forward);
    for (int i = n_forward; i < n; i++) {
        const int u = e[i].unit;
        /* Who waits gives what is done, and the last is not given before the loss is kept (shm/scatter.h). */
        if (e[i].kind == LG_EVENT_EXCHANGE) LG_ASSERT(done < r->units);
        if (e[i].kind == LG_EVENT_GRADIENT) {
            l[u].first = i;
            l[u].bytes = r->unit[u].bytes = t->unit[u].count * sizeof(float);
        } else if (e[i].kind == LG_EVENT_GRADIENT_DONE) {
            r->unit[u].order = done;
            r->by_order[done++] = u;
            l[u].last = n; /* unless others are done after it */
            if (done > RING_LAG) l[r->by_order[done - 1 - RING_LAG]].last = i;
        }
    }
    LG_ASSERT(done == r->units);
}

static bool overlap(const struct lg_ring_unit *a, const struct lg_ring_unit *b)
{
    return a->at < b->at + b->bytes && b->at < a->at + a->bytes;
}

/* How long ago what lies in its place was done, in the worst case. */
static int find_back(const struct lg_ring *r, int unit)
{
    int back = r->units;
    for (int v = 0; v < r->units; v++) {
        if (v == unit || !overlap(&r->unit[unit], &r->unit[v])) continue;
        int ago = r->unit[unit].order - r->unit[v].order;
        if (ago <= 0) ago += r->units;
        back = LG_MIN(back, ago);
    }
    return back;
}

void lg_ring_plan(const lg_params *t, const lg_denoiser *net, struct lg_ring *ret)
{
    const size_t n = (size_t)t->n_units;
    struct lg_lifetime *l = calloc(n, sizeof *l);
    *ret = (struct lg_ring){.units = t->n_units,
                            .unit = calloc(n, sizeof *ret->unit),
                            .by_order = calloc(n, sizeof *ret->by_order)};
    LG_ASSERT(l && ret->unit && ret->by_order);
    find_lifetimes(t, net, ret, l);
    ret->bytes = lg_lifetimes_place(l, ret->units);
    for (int u = 0; u < ret->units; u++) ret->unit[u].at = l[u].at;
    for (int u = 0; u < ret->units; u++) ret->unit[u].back = find_back(ret, u);
    for (int u = 0; u < ret->units; u++) ret->largest = LG_MAX(ret->largest, ret->unit[u].bytes);
    ret->hash = lg_hash(ret->unit, n * sizeof *ret->unit);
    free(l);
}

void lg_ring_free(struct lg_ring *r)
{
    free(r->unit);
    free(r->by_order);
    *r = (struct lg_ring){0};
}
