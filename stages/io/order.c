/* The order of samples with buckets; see order.h. */
#include "stages/io/order.h"
#include "base/heartbeat.h"
#include "stages/io/permute.h"
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { BUCKET_SHIFT = 48, GROUPS_KEY = UINT16_MAX };

struct lg_order {
    struct lg_buckets buckets;
    uint64_t count, ranks, micros, micro;
    struct lg_order_bucket of[LG_BUCKETS_MAX];
    uint64_t item_at[LG_BUCKETS_MAX + 1];  /* first place of a bucket's items in `item` */
    uint64_t group_at[LG_BUCKETS_MAX + 1]; /* likewise of its groups, in an epoch not shuffled */
    int used;                              /* buckets with items */
    uint64_t *item;                        /* (count): by bucket, then by number */
    uint8_t *bucket;                       /* (count): of each item */
};
static_assert(LG_BUCKETS_MAX <= UINT8_MAX, "a bucket is a byte");

static uint64_t group_items(const lg_order *o, int k)
{
    return o->ranks * (uint64_t)o->buckets.of[k].rows;
}

/* ---- making ---- */

/* The nearest in ratio of those of `used` (NULL: all) with the most frames, up to `frames`, of clips more than one; -1: there
 * is none. */
static int nearest(const lg_order *o, const bool *used, uint32_t frames, bool is_clip, int height,
                   int width)
{
    bool can[LG_BUCKETS_MAX];
    int most = 0;
    for (int k = 0; k < o->buckets.n; k++) {
        const int f = o->buckets.of[k].frames;
        can[k] = (!used || used[k]) && (f > 1) == is_clip && (uint32_t)f <= frames;
        if (can[k]) most = LG_MAX(most, f);
    }
    for (int k = 0; k < o->buckets.n; k++) can[k] = can[k] && o->buckets.of[k].frames == most;
    return most ? lg_buckets_nearest(&o->buckets, can, height, width) : -1;
}

static void find_nearest(lg_order *o, const struct lg_order_spec *spec)
{
    for (uint64_t i = 0; i < o->count; i++) {
        const struct lg_item_size *s = &spec->size[i];
        const bool known = s->height && s->width, is_clip = s->frames > 1;
        const int height = known ? s->height : 1, width = known ? s->width : 1;
        const struct lg_clip_info info = {.frames = LG_MAX(s->frames, 1u),
                                          .duration_ms = s->duration_ms};
        int k = nearest(o, NULL, lg_clip_frames_at(&info, &spec->rate), is_clip, height, width);
        if (k < 0) k = lg_buckets_nearest(&o->buckets, NULL, height, width);
        o->bucket[i] = (uint8_t)k;
        o->of[k].nearest++;
        if (i % 65536 == 0) lg_heartbeat();
    }
}

/* The bucket that may have the items of k; -1: there is none. */
static int neighbour(const lg_order *o, const bool *used, int k)
{
    const struct lg_bucket *b = &o->buckets.of[k];
    bool others[LG_BUCKETS_MAX];
    memcpy(others, used, sizeof others);
    others[k] = false;
    return nearest(o, others, (uint32_t)b->frames, b->frames > 1, b->height, b->width);
}

/* The used bucket with the fewest items, if these do not fill a group and another may have them; -1: there is none. */
static int smallest(const lg_order *o, const bool *used)
{
    int least = -1;
    for (int k = 0; k < o->buckets.n; k++) {
        if (!used[k] || o->of[k].items >= group_items(o, k)) continue;
        if (least >= 0 && o->of[k].items >= o->of[least].items) continue;
        if (neighbour(o, used, k) >= 0) least = k;
    }
    return least;
}

/* into[k]: which bucket has k's items. */
static void give_up_small(lg_order *o, int *into)
{
    bool used[LG_BUCKETS_MAX] = {false};
    for (int k = 0; k < o->buckets.n; k++) {
        into[k] = k;
        o->of[k].items = o->of[k].nearest;
        used[k] = o->of[k].items > 0;
    }
    for (int k; (k = smallest(o, used)) >= 0;) {
        const int to = neighbour(o, used, k);
        used[k] = false;
        o->of[to].items += o->of[k].items;
        o->of[k].items = 0;
        for (int i = 0; i < o->buckets.n; i++)
            if (into[i] == k) into[i] = to;
    }
    for (int k = 0; k < o->buckets.n; k++) o->used += used[k];
}

/* A counting sort. */
static void sort_items(lg_order *o, const int *into)
{
    uint64_t next[LG_BUCKETS_MAX];
    for (int k = 0; k < o->buckets.n; k++) {
        const uint64_t holds = group_items(o, k);
        o->of[k].groups = (o->of[k].items + holds - 1) / holds;
        next[k] = o->item_at[k];
        o->item_at[k + 1] = o->item_at[k] + o->of[k].items;
        o->group_at[k + 1] = o->group_at[k] + o->of[k].groups;
    }
    for (uint64_t i = 0; i < o->count; i++) {
        const int k = into[o->bucket[i]];
        o->bucket[i] = (uint8_t)k;
        o->item[next[k]++] = i;
    }
}

int lg_order_make(const struct lg_order_spec *spec, lg_order **ret)
{
    int into[LG_BUCKETS_MAX];
    LG_ASSERT(spec->count && spec->buckets->n && spec->ranks && spec->micros && spec->micro);
    lg_order *o = calloc(1, sizeof *o);
    if (!o) goto fail;
    o->buckets = *spec->buckets;
    o->count = spec->count;
    o->ranks = spec->ranks;
    o->micros = spec->micros;
    o->micro = spec->micro;
    o->item = calloc(o->count, sizeof *o->item);
    o->bucket = calloc(o->count, sizeof *o->bucket);
    if (!o->item || !o->bucket) goto fail;
    find_nearest(o, spec);
    give_up_small(o, into);
    sort_items(o, into);
    *ret = o;
    return 0;
fail:
    lg_order_free(&o);
    return LG_FAIL(LG_ERR_NOSPACE, "no memory for the order of %llu items",
                   (unsigned long long)spec->count);
}

void lg_order_free(lg_order **o)
{
    if (!*o) return;
    free((*o)->item);
    free((*o)->bucket);
    free(*o);
    *o = NULL;
}

/* ---- asking ---- */

static uint64_t shuffled(const struct lg_order_key *key, uint64_t epoch, uint64_t what,
                         uint64_t position, uint64_t count)
{
    LG_ASSERT(epoch < UINT64_C(1) << BUCKET_SHIFT);
    return lg_permute(key->seed, epoch | what << BUCKET_SHIFT, position, count);
}

/* Which bucket's is this group? */
static int bucket_of(const lg_order *o, uint64_t group)
{
    int low = 0, high = o->buckets.n - 1; /* the last k with group_at[k] <= group */
    while (low < high) {
        const int k = (low + high + 1) / 2;
        if (o->group_at[k] <= group)
            low = k;
        else
            high = k - 1;
    }
    return low;
}

struct lg_order_place lg_order_at(const lg_order *o, const struct lg_order_key *key, uint64_t n)
{
    const uint64_t share = o->micros * o->micro, batch = o->ranks * share;
    const uint64_t rank = n % batch / share, row = n % o->micro;
    LG_ASSERT(n >= key->first && key->first % batch == 0);
    const uint64_t p = (n - key->first) / batch * o->micros + n % share / o->micro;
    const uint64_t all = lg_order_groups(o), epoch = key->epoch + p / all;
    uint64_t group = p % all;
    if (!key->no_shuffle && o->used > 1) group = shuffled(key, epoch, GROUPS_KEY, group, all);
    const int k = bucket_of(o, group);
    const uint64_t rows = (uint64_t)o->buckets.of[k].rows;
    uint64_t i = (group - o->group_at[k]) * o->ranks * rows + rank * rows + row;
    struct lg_order_place place = {.bucket = k, .item = LG_ITEM_ABSENT, .epoch = epoch};
    if (row >= rows || i >= o->of[k].items) return place;
    const uint64_t what = o->used > 1 ? (uint64_t)k : 0;
    if (!key->no_shuffle) i = shuffled(key, epoch, what, i, o->of[k].items);
    place.item = o->item[o->item_at[k] + i];
    return place;
}

uint64_t lg_order_hash(const lg_order *o, uint64_t source)
{
    char text[LG_BUCKETS_TEXT_BYTES];
    const uint64_t numbers[] = {source, o->count, o->ranks, o->micros, o->micro};
    lg_buckets_print(&o->buckets, text);
    XXH3_state_t *h = XXH3_createState();
    LG_ASSERT(h);
    XXH3_64bits_reset(h);
    XXH3_64bits_update(h, numbers, sizeof numbers);
    XXH3_64bits_update(h, text, strlen(text));
    XXH3_64bits_update(h, o->bucket, o->count);
    const uint64_t hash = XXH3_64bits_digest(h);
    XXH3_freeState(h);
    return hash ? hash : 1;
}

struct lg_order_bucket lg_order_bucket(const lg_order *o, int k)
{
    LG_ASSERT(k >= 0 && k < o->buckets.n);
    return o->of[k];
}

uint64_t lg_order_groups(const lg_order *o)
{
    return o->group_at[o->buckets.n];
}
