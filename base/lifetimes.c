/* Places for stretches of memory; see lifetimes.h. */
#include "base/lifetimes.h"
#include "base/check.h"
#include <stdlib.h>

enum { ALIGN = 64 };

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t down(size_t bytes)
{
    return bytes / ALIGN * ALIGN;
}

static int by_size(const void *a, const void *b)
{
    const struct lg_lifetime *x = *(struct lg_lifetime *const *)a;
    const struct lg_lifetime *y = *(struct lg_lifetime *const *)b;
    if (aligned(x->bytes) != aligned(y->bytes)) return x->bytes < y->bytes ? 1 : -1;
    return (x > y) - (x < y);
}

static int by_place(const void *a, const void *b)
{
    const struct lg_lifetime *x = *(const struct lg_lifetime *const *)a;
    const struct lg_lifetime *y = *(const struct lg_lifetime *const *)b;
    return (x->at > y->at) - (x->at < y->at);
}

/* Those that have a place, and room for those of them that one meets. */
struct placed {
    const struct lg_lifetime **l, **met;
    int n;
};

/* Into p->met those that are needed when l is; returns how many. */
static int find_met(const struct lg_lifetime *l, const struct placed *p)
{
    int n = 0;
    for (int i = 0; i < p->n; i++)
        if (p->l[i]->first <= l->last && l->first <= p->l[i]->last) p->met[n++] = p->l[i];
    return n;
}

/* The lowest offset at which it meets none of them. */
static size_t find_place(const struct lg_lifetime *l, const struct placed *p)
{
    const int n_met = find_met(l, p);
    qsort(p->met, (size_t)n_met, sizeof *p->met, by_place);
    size_t at = 0;
    for (int i = 0; i < n_met; i++) {
        if (p->met[i]->at >= at + aligned(l->bytes)) break;
        at = LG_MAX(at, p->met[i]->at + aligned(p->met[i]->bytes));
    }
    return at;
}

/* By where it ends, the last first. */
static int by_end(const void *a, const void *b)
{
    const struct lg_lifetime *x = *(const struct lg_lifetime *const *)a;
    const struct lg_lifetime *y = *(const struct lg_lifetime *const *)b;
    return (x->at + x->bytes < y->at + y->bytes) - (x->at + x->bytes > y->at + y->bytes);
}

/* The highest offset before `room`; LG_NO_PLACE: there is none. */
static size_t find_last_place(const struct lg_lifetime *l, const struct placed *p, size_t room)
{
    const size_t bytes = aligned(l->bytes);
    const int n_met = find_met(l, p);
    qsort(p->met, (size_t)n_met, sizeof *p->met, by_end);
    for (int i = 0; i < n_met; i++) {
        const struct lg_lifetime *met = p->met[i];
        if (bytes <= room && aligned(met->at + met->bytes) <= down(room - bytes)) break;
        room = LG_MIN(room, met->at);
    }
    return bytes <= room ? down(room - bytes) : LG_NO_PLACE;
}

/* All of them, the largest first, in `order`, behind what is placed already. */
static struct placed begin(struct lg_lifetime *l, int n, int n_taken, struct lg_lifetime ***ret)
{
    const size_t most = (size_t)LG_MAX(n + n_taken, 1);
    struct placed p = {.l = calloc(most, sizeof *p.l), .met = calloc(most, sizeof *p.met)};
    struct lg_lifetime **order = calloc((size_t)LG_MAX(n, 1), sizeof *order);
    LG_ASSERT(order && p.l && p.met);
    for (int i = 0; i < n; i++) order[i] = &l[i];
    qsort(order, (size_t)n, sizeof *order, by_size);
    *ret = order;
    return p;
}

static void end(struct placed *p, struct lg_lifetime **order)
{
    free(order);
    free(p->l);
    free(p->met);
}

size_t lg_lifetimes_place(struct lg_lifetime *l, int n)
{
    struct lg_lifetime **order;
    struct placed p = begin(l, n, 0, &order);
    size_t bytes = 0;
    for (int i = 0; i < n; i++) {
        order[i]->at = find_place(order[i], &p);
        p.l[p.n++] = order[i];
        bytes = LG_MAX(bytes, order[i]->at + aligned(order[i]->bytes));
    }
    end(&p, order);
    return bytes;
}

void lg_lifetimes_place_in(const struct lg_lifetimes_room *room, struct lg_lifetime *l, int n)
{
    struct lg_lifetime **order;
    struct placed p = begin(l, n, room->n_taken, &order);
    for (int i = 0; i < room->n_taken; i++) p.l[p.n++] = &room->taken[i];
    for (int i = 0; i < n; i++) {
        order[i]->at = find_last_place(order[i], &p, room->bytes);
        if (order[i]->at != LG_NO_PLACE) p.l[p.n++] = order[i];
    }
    end(&p, order);
}
