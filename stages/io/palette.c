/* Variance cut; see palette.h. */
#include "stages/io/palette.h"
#include <stdlib.h>
#include <string.h>

struct colour {
    uint32_t key; /* red << 16 | green << 8 | blue */
    uint32_t count;
};

/* Colours [first, end), and what their spread is. */
struct box {
    size_t first, end;
    int axis;     /* the channel with the greatest variance */
    double mean;  /* in it */
    double error; /* squared, of all channels together, times counts */
};

static int channel(uint32_t key, int c)
{
    return (int)(key >> (16 - 8 * c) & 255);
}

static int by_key(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Distinct colours in rising order of their keys; returns how many. `keys` is sorted in place. */
static size_t count_colours(uint32_t *keys, size_t n, struct colour *ret)
{
    size_t distinct = 0;
    qsort(keys, n, sizeof *keys, by_key);
    for (size_t i = 0; i < n; i++) {
        if (!distinct || ret[distinct - 1].key != keys[i])
            ret[distinct++] = (struct colour){.key = keys[i]};
        ret[distinct - 1].count++;
    }
    return distinct;
}

static struct box measure(const struct colour *v, size_t first, size_t end)
{
    struct box b = {.first = first, .end = end};
    double worst = -1;
    for (int c = 0; c < 3; c++) {
        double n = 0, sum = 0, squares = 0;
        for (size_t i = first; i < end; i++) {
            double x = channel(v[i].key, c), w = v[i].count;
            n += w, sum += w * x, squares += w * x * x;
        }
        double error = squares - sum * sum / n;
        b.error += error;
        if (error > worst) worst = error, b.axis = c, b.mean = sum / n;
    }
    return b;
}

/* Brings the colours up to the mean to the front; returns where the others begin. Both are some, as the colours differ. */
static size_t divide(struct colour *v, const struct box *b)
{
    size_t at = b->first;
    for (size_t i = b->first; i < b->end; i++)
        if (channel(v[i].key, b->axis) <= b->mean) {
            struct colour swap = v[at];
            v[at++] = v[i];
            v[i] = swap;
        }
    return at;
}

static void mean_of(const struct colour *v, const struct box *b, uint8_t ret[3])
{
    for (int c = 0; c < 3; c++) {
        uint64_t n = 0, sum = 0;
        for (size_t i = b->first; i < b->end; i++)
            n += v[i].count, sum += (uint64_t)channel(v[i].key, c) * v[i].count;
        ret[c] = (uint8_t)((2 * sum + n) / (2 * n));
    }
}

static void cut(struct colour *v, size_t n, struct lg_palette *ret)
{
    struct box box[LG_PALETTE_MAX];
    box[0] = measure(v, 0, n);
    for (ret->n = 1; ret->n < LG_PALETTE_MAX; ret->n++) {
        int worst = 0;
        for (int i = 1; i < ret->n; i++)
            if (box[i].error > box[worst].error) worst = i;
        const struct box b = box[worst];
        size_t at = divide(v, &b);
        if (at == b.first || at == b.end) break; /* one colour: nothing left to cut */
        box[worst] = measure(v, b.first, at);
        box[ret->n] = measure(v, at, b.end);
    }
    for (int i = 0; i < ret->n; i++) mean_of(v, &box[i], ret->rgb[i]);
}

static uint8_t nearest(const struct lg_palette *p, uint32_t key)
{
    int best = 0, least = INT32_MAX;
    for (int i = 0; i < p->n; i++) {
        int d = 0;
        for (int c = 0; c < 3; c++) {
            int e = p->rgb[i][c] - channel(key, c);
            d += e * e;
        }
        if (d < least) least = d, best = i;
    }
    return (uint8_t)best;
}

/* What the nearest entry of a colour is, of the last colour with this hash. */
enum { SLOTS = 1 << 16 };
struct slot {
    uint32_t key;
    uint8_t entry;
};

static void assign(const struct lg_palette *p, const uint32_t *keys, struct slot *cache,
                   size_t count, uint8_t *index)
{
    for (int i = 0; i < SLOTS; i++) cache[i].key = UINT32_MAX; /* no colour */
    for (size_t i = 0; i < count; i++) {
        struct slot *s = &cache[(keys[i] * 2654435761u) >> 16];
        if (s->key != keys[i]) *s = (struct slot){.key = keys[i], .entry = nearest(p, keys[i])};
        index[i] = s->entry;
    }
}

static void keys_of(const uint8_t *rgb, size_t count, uint32_t *ret)
{
    for (size_t i = 0; i < count; i++)
        ret[i] = (uint32_t)rgb[3 * i] << 16 | (uint32_t)rgb[3 * i + 1] << 8 | rgb[3 * i + 2];
}

int lg_palette_of(const uint8_t *rgb, size_t count, struct lg_palette *ret, uint8_t *ret_index)
{
    uint32_t *keys = malloc(count * sizeof *keys);
    struct colour *colours = malloc(count * sizeof *colours);
    struct slot *cache = malloc(SLOTS * sizeof *cache);
    int rc = 0;
    if (!keys || !colours || !cache) {
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory for the palette of %zu pixels", count);
        goto out;
    }
    keys_of(rgb, count, keys);
    size_t n = count_colours(keys, count, colours);
    *ret = (struct lg_palette){0};
    if (n <= LG_PALETTE_MAX)
        for (; ret->n < (int)n; ret->n++)
            for (int c = 0; c < 3; c++)
                ret->rgb[ret->n][c] = (uint8_t)channel(colours[ret->n].key, c);
    else
        cut(colours, n, ret);
    keys_of(rgb, count, keys); /* they were sorted */
    assign(ret, keys, cache, count, ret_index);
out:
    free(keys);
    free(colours);
    free(cache);
    return rc;
}
