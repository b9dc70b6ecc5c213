/* Places for stretches of memory; see lifetimes.h. */
#include "base/lifetimes.h"
#include "base/check.h"
#include <stdlib.h>

enum { ALIGN = 64 };

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
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
    const struct lg_lifetime *x = *(struct lg_lifetime *const *)a;
    const struct lg_lifetime *y = *(struct lg_lifetime *const *)b;
    return (x->at > y->at) - (x->at < y->at);
}

/* The lowest offset at which it meets none of the placed ones that are needed when it is. */
static size_t find_place(const struct lg_lifetime *l, struct lg_lifetime *const *placed, int n,
                         struct lg_lifetime **met)
{
    int n_met = 0;
    for (int i = 0; i < n; i++)
        if (placed[i]->first <= l->last && l->first <= placed[i]->last) met[n_met++] = placed[i];
    qsort(met, (size_t)n_met, sizeof *met, by_place);
    size_t at = 0;
    for (int i = 0; i < n_met; i++) {
        if (met[i]->at >= at + aligned(l->bytes)) break;
        at = LG_MAX(at, met[i]->at + aligned(met[i]->bytes));
    }
    return at;
}

size_t lg_lifetimes_place(struct lg_lifetime *l, int n)
{
    const size_t room = (size_t)LG_MAX(n, 1);
    struct lg_lifetime **order = calloc(room, sizeof *order), **met = calloc(room, sizeof *met);
    LG_ASSERT(order && met);
    size_t end = 0;
    for (int i = 0; i < n; i++) order[i] = &l[i];
    qsort(order, (size_t)n, sizeof *order, by_size);
    for (int i = 0; i < n; i++) {
        order[i]->at = find_place(order[i], order, i, met);
        end = LG_MAX(end, order[i]->at + aligned(order[i]->bytes));
    }
    free(order);
    free(met);
    return end;
}
