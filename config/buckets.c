/* Aspect-ratio buckets; see buckets.h. */
#include "config/buckets.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_shape(const void *a, const void *b)
{
    const struct lg_bucket *x = a, *y = b;
    return x->height != y->height ? (x->height < y->height ? -1 : 1)
                                  : (x->width > y->width) - (x->width < y->width);
}

static bool has(const struct lg_buckets *b, int height, int width)
{
    for (int i = 0; i < b->n; i++)
        if (b->of[i].height == height && b->of[i].width == width) return true;
    return false;
}

/* What is there already is left out. */
static int add(struct lg_buckets *b, int height, int width)
{
    if (has(b, height, width)) return 0;
    if (b->n == LG_BUCKETS_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "more than %d buckets", LG_BUCKETS_MAX);
    b->of[b->n++] = (struct lg_bucket){.height = height, .width = width};
    return 0;
}

/* ---- the tables ---- */

static int up_to_multiple(int n, int of)
{
    return (n + of - 1) / of * of;
}

static int make_ratio(const struct lg_buckets_spec *s, struct lg_buckets *b)
{
    const bool usual = s->size >= 512;
    const int step = up_to_multiple(usual ? 64 : LG_MAX(s->size / 8, 1), s->unit);
    const int least = LG_MAX(usual ? 256 : s->size / 2, step) / step * step, most = 2 * s->size;
    const int square = LG_MAX(s->size / step, 1) * step;
    LG_TRY(add(b, square, square));
    for (int width = least; width <= most; width += step) {
        int height = LG_MIN(most, s->size * s->size / width) / step * step;
        if (height < least) continue;
        LG_TRY(add(b, height, width));
        LG_TRY(add(b, width, height));
    }
    return 0;
}

static int make_pixart(const struct lg_buckets_spec *s, struct lg_buckets *b)
{
    /* in units of 1 / 32 of the size */
    static const uint8_t shape[][2] = {
        {16, 64}, {16, 62}, {16, 60}, {16, 58}, {18, 56}, {18, 54}, {18, 52},
        {20, 50}, {20, 48}, {22, 46}, {22, 44}, {22, 42}, {24, 42}, {24, 40},
        {26, 38}, {26, 36}, {28, 36}, {28, 34}, {30, 34}, {30, 32}, {32, 32},
    };
    if (s->size != 256 && s->size != 512 && s->size != 1024)
        return LG_FAIL(LG_ERR_CONFIG,
                       "\"pixart\" is a table for data.size = 256, 512 or 1024, not %d: set one of "
                       "them, or use \"ratio\"",
                       s->size);
    const int part = s->size / 32;
    for (size_t i = 0; i < LG_ARRAY_LEN(shape); i++) {
        LG_TRY(add(b, shape[i][0] * part, shape[i][1] * part));
        if (shape[i][0] == 22 && shape[i][1] == 42) continue; /* 1344 x 704 is none of theirs */
        LG_TRY(add(b, shape[i][1] * part, shape[i][0] * part));
    }
    return 0;
}

static int add_named(const char *text, struct lg_buckets *b)
{
    int height = 0, width = 0, used = 0;
    if (sscanf(text, "%5dx%5d%n", &height, &width, &used) != 2 || text[used] || height < 1 ||
        width < 1 || height > LG_BUCKET_SIDE_MAX || width > LG_BUCKET_SIDE_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "\"%.40s\": expected HEIGHTxWIDTH in pixels, at most %d each, as "
                       "\"832x1216\"; or one of \"square\", \"ratio\", \"pixart\" alone",
                       text, LG_BUCKET_SIDE_MAX);
    if (has(b, height, width)) return LG_FAIL(LG_ERR_CONFIG, "%s stands there twice", text);
    LG_TRY(add(b, height, width));
    return 0;
}

/* ---- all ---- */

static int check_sides(const struct lg_buckets_spec *s, const struct lg_buckets *b)
{
    for (int i = 0; i < b->n; i++) {
        const int h = b->of[i].height, w = b->of[i].width, u = s->unit;
        if (h % u == 0 && w % u == 0) continue;
        return LG_FAIL(LG_ERR_CONFIG,
                       "%dx%d: sides must be multiples of %d pixels (the VAE's factor x "
                       "model.patch), as %dx%d",
                       h, w, u, up_to_multiple(h, u), up_to_multiple(w, u));
    }
    return 0;
}

int lg_buckets_make(const struct lg_strlist *wanted, const struct lg_buckets_spec *spec,
                    struct lg_buckets *ret)
{
    struct lg_buckets b = {0};
    const char *first = wanted->n ? wanted->v[0] : "square";
    const int64_t room = (int64_t)spec->micro_batch * spec->size * spec->size;
    LG_ASSERT(spec->size >= 1 && spec->unit >= 1 && spec->micro_batch >= 1);
    *ret = b;
    if (wanted->n <= 1 && !strcmp(first, "square")) return 0;
    if (wanted->n == 1 && !strcmp(first, "ratio")) {
        LG_TRY(make_ratio(spec, &b));
    } else if (wanted->n == 1 && !strcmp(first, "pixart")) {
        LG_TRY(make_pixart(spec, &b));
    } else {
        for (int i = 0; i < wanted->n; i++) LG_TRY(add_named(wanted->v[i], &b));
    }
    LG_TRY(check_sides(spec, &b));
    qsort(b.of, (size_t)b.n, sizeof *b.of, by_shape);
    for (int i = 0; i < b.n; i++) {
        int64_t fit = room / ((int64_t)b.of[i].height * b.of[i].width);
        b.of[i].rows = (int)LG_MIN(LG_MAX(fit, 1), spec->micro_batch);
    }
    *ret = b;
    return 0;
}

/* ---- choosing ---- */

/* How far two ratios are apart: over / under >= 1. */
struct distance {
    uint64_t over, under;
};

static struct distance distance(const struct lg_bucket *b, int height, int width)
{
    uint64_t x = (uint64_t)b->height * (uint64_t)width, y = (uint64_t)height * (uint64_t)b->width;
    return (struct distance){.over = LG_MAX(x, y), .under = LG_MIN(x, y)};
}

static bool covers(const struct lg_bucket *b, int height, int width)
{
    return height >= b->height && width >= b->width;
}

/* Of two of the same ratio. */
static bool fits_better(const struct lg_bucket *a, const struct lg_bucket *than, int height,
                        int width)
{
    const bool can = covers(a, height, width), could = covers(than, height, width);
    return can != could ? can : can ? a->height > than->height : a->height < than->height;
}

int lg_buckets_nearest(const struct lg_buckets *b, const bool *used, int height, int width)
{
    int best = -1;
    struct distance least = {0, 0};
    LG_ASSERT(height > 0 && width > 0 && height < 1 << 20 && width < 1 << 20);
    for (int k = 0; k < b->n; k++) {
        if (used && !used[k]) continue;
        struct distance d = distance(&b->of[k], height, width);
        unsigned __int128 mine = (unsigned __int128)d.over * least.under;
        unsigned __int128 other = (unsigned __int128)least.over * d.under;
        if (best >= 0 && mine > other) continue;
        if (best >= 0 && mine == other && !fits_better(&b->of[k], &b->of[best], height, width))
            continue;
        best = k;
        least = d;
    }
    LG_ASSERT(best >= 0);
    return best;
}

/* ---- as text ---- */

void lg_buckets_print(const struct lg_buckets *b, char ret[LG_BUCKETS_TEXT_BYTES])
{
    size_t at = 0;
    ret[0] = 0;
    for (int i = 0; i < b->n; i++)
        at += (size_t)snprintf(ret + at, LG_BUCKETS_TEXT_BYTES - at, "%s%dx%d*%d", i ? "," : "",
                               b->of[i].height, b->of[i].width, b->of[i].rows);
    LG_ASSERT(at < LG_BUCKETS_TEXT_BYTES);
}

int lg_buckets_parse(const char *text, struct lg_buckets *ret)
{
    struct lg_buckets b = {0};
    for (const char *at = text; *at;) {
        struct lg_bucket k;
        int used = 0;
        bool well = b.n < LG_BUCKETS_MAX &&
                    sscanf(at, "%5dx%5d*%6d%n", &k.height, &k.width, &k.rows, &used) == 3 &&
                    k.height >= 1 && k.width >= 1 && k.rows >= 1 &&
                    k.height <= LG_BUCKET_SIDE_MAX && k.width <= LG_BUCKET_SIDE_MAX;
        at += used;
        well = well && (*at == ',' ? at[1] != 0 : *at == 0);
        if (!well) return LG_FAIL(LG_ERR_CORRUPT, "buckets \"%.60s\" are none", text);
        b.of[b.n++] = k;
        at += *at == ',';
    }
    *ret = b;
    return 0;
}
