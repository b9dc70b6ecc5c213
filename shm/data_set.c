/* The data set on the board; see data_set.h. */
#include "shm/data_set.h"
#include "shm/board.h"
#include <string.h>

/* What a loader has to see; false: whatever it is. */
static bool expected(const struct lg_board_data *d, uint64_t hash, struct lg_data_part *ret)
{
    const struct lg_data_part *last = d->n_known ? &d->known[d->n_known - 1] : NULL;
    if (hash) {
        *ret = (struct lg_data_part){.items = atomic_load_explicit(&d->items, memory_order_acquire),
                                     .hash = hash};
        return true;
    }
    if (last && !d->may_change) *ret = *last;
    return last && !d->may_change;
}

int lg_data_agree(lg_board *b, uint64_t items, uint64_t hash, struct lg_data_part *ret_expected)
{
    struct lg_board_data *d = &b->s->data;
    struct lg_data_part want;
    LG_ASSERT(hash && items);
    uint64_t seen = atomic_load_explicit(&d->hash, memory_order_acquire);
    if (!expected(d, seen, &want) || (!seen && want.hash == hash && want.items == items))
        if (atomic_compare_exchange_strong_explicit(&d->hash, &seen, hash, memory_order_acq_rel,
                                                    memory_order_acquire))
            seen = hash;
    if (seen != hash) {
        expected(d, seen, ret_expected);
        return LG_ERR_MISMATCH;
    }
    atomic_store_explicit(&d->items, items, memory_order_release);
    return 0;
}

bool lg_data_same_tokenizer(lg_board *b, int text, uint64_t hash)
{
    uint64_t seen = 0;
    LG_ASSERT(hash);
    if (atomic_compare_exchange_strong_explicit(&b->s->data.tokenizer[text], &seen, hash,
                                                memory_order_acq_rel, memory_order_acquire))
        seen = hash;
    return seen == hash;
}

int lg_data_parts(lg_board *b, struct lg_data_part ret[LG_DATA_PARTS_MAX])
{
    const struct lg_board_data *d = &b->s->data;
    uint64_t items = atomic_load_explicit(&d->items, memory_order_acquire);
    uint64_t hash = atomic_load_explicit(&d->hash, memory_order_acquire);
    int n = (int)d->n_known;
    memcpy(ret, d->known, sizeof *ret * (size_t)n);
    if (!items) return n;
    if (!n) {
        ret[0] = (struct lg_data_part){.items = items, .hash = hash};
        return 1;
    }
    const struct lg_data_part *last = &ret[n - 1];
    if (last->hash == hash && last->items == items) return n;
    const uint64_t batch = b->s->batch * (uint64_t)b->s->hosts.count;
    struct lg_data_part next = lg_data_next(last, b->s->start_step * batch, items, hash);
    if (next.first == last->first) n--; /* nothing was trained on that one */
    LG_ASSERT(n < LG_DATA_PARTS_MAX);
    ret[n] = next;
    return n + 1;
}
