/* Buckets; see buckets.h. */
#include "config/buckets.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_shape(const void *a, const void *b)
{
    const struct lg_bucket *x = a, *y = b;
    const int by[] = {x->frames - y->frames, x->height - y->height, x->width - y->width};
    return by[0] ? by[0] : by[1] ? by[1] : by[2];
}

static bool has(const struct lg_buckets *b, const struct lg_bucket *k)
{
    for (int i = 0; i < b->n; i++)
        if (by_shape(&b->of[i], k) == 0) return true;
    return false;
}

/* What is there already is left out. */
static int add(struct lg_buckets *b, int frames, int height, int width)
{
    const struct lg_bucket k = {.frames = frames, .height = height, .width = width};
    if (has(b, &k)) return 0;
    if (b->n == LG_BUCKETS_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "more than %d buckets", LG_BUCKETS_MAX);
    b->of[b->n++] = k;
    return 0;
}

/* ---- the tables ---- */

static int up_to_multiple(int n, int of)
{
    return (n + of - 1) / of * of;
}

/* Side of the square with as many pixels. */
static int size_of(const struct lg_buckets_spec *s)
{
    return (int)sqrt((double)s->height * s->width); /* exact: both factors are below 2^13 */
}

static int make_ratio(const struct lg_buckets_spec *s, struct lg_buckets *b)
{
    const int size = size_of(s);
    const bool usual = size >= 512;
    const int step = up_to_multiple(usual ? 64 : LG_MAX(size / 8, 1), s->unit);
    const int least = LG_MAX(usual ? 256 : size / 2, step) / step * step, most = 2 * size;
    const int square = LG_MAX(size / step, 1) * step;
    LG_TRY(add(b, s->frames, square, square));
    for (int width = least; width <= most; width += step) {
        int height = LG_MIN(most, size * size / width) / step * step;
        if (height < least) continue;
        LG_TRY(add(b, s->frames, height, width));
        LG_TRY(add(b, s->frames, width, height));
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
    const int size = size_of(s), part = size / 32;
    if (size != 256 && size != 512 && size != 1024)
        return LG_FAIL(LG_ERR_CONFIG,
                       "\"pixart\" is a table for data.size = 256, 512 or 1024, not %d: set one of "
                       "them, or use \"ratio\"",
                       size);
    for (size_t i = 0; i < LG_ARRAY_LEN(shape); i++) {
        LG_TRY(add(b, s->frames, shape[i][0] * part, shape[i][1] * part));
        if (shape[i][0] == 22 && shape[i][1] == 42) continue; /* 1344 x 704 is none of theirs */
        LG_TRY(add(b, s->frames, shape[i][1] * part, shape[i][0] * part));
    }
    return 0;
}

/* One of the plan's file or of a config, "17x64x32" or "64x32": how many characters it has; 0: it is none. Without
 * frames ret's stay. */
static int read_shape(const char *text, struct lg_bucket *ret)
{
    int a = 0, b = 0, c = 0, used = 0, all = 0;
    const int n = sscanf(text, "%5dx%5d%nx%5d%n", &a, &b, &used, &c, &all);
    if (n < 2) return 0;
    if (n == 3) ret->frames = a;
    ret->height = n == 3 ? b : a;
    ret->width = n == 3 ? c : b;
    const bool well = ret->frames >= 1 && ret->frames <= LG_FRAMES_MAX && ret->height >= 1 &&
                      ret->width >= 1 && ret->height <= LG_BUCKET_SIDE_MAX &&
                      ret->width <= LG_BUCKET_SIDE_MAX;
    return !well ? 0 : n == 3 ? all : used;
}

static int add_named(const char *text, const struct lg_buckets_spec *s, struct lg_buckets *b)
{
    struct lg_bucket k = {.frames = s->frames};
    const int used = read_shape(text, &k);
    if (!used || text[used])
        return LG_FAIL(LG_ERR_CONFIG,
                       "\"%.40s\": expected HEIGHTxWIDTH in pixels, at most %d each, as "
                       "\"832x1216\", of clips FRAMESxHEIGHTxWIDTH; or one of \"square\", "
                       "\"ratio\", \"pixart\" alone",
                       text, LG_BUCKET_SIDE_MAX);
    if (has(b, &k)) return LG_FAIL(LG_ERR_CONFIG, "%s stands there twice", text);
    LG_TRY(add(b, k.frames, k.height, k.width));
    return 0;
}

/* ---- all ---- */

static int check_sides(const struct lg_buckets_spec *s, const struct lg_buckets *b)
{
    for (int i = 0; i < b->n; i++) {
        const int f = b->of[i].frames, t = s->factor_time;
        const int h = b->of[i].height, w = b->of[i].width, u = s->unit;
        if (!lg_frames_fit(f, t))
            return LG_FAIL(LG_ERR_CONFIG,
                           "%dx%dx%d: frames must be a multiple of %d (the VAE's factor in time) "
                           "and one more, as %dx%dx%d",
                           f, h, w, t, (f + t - 2) / t * t + 1, h, w);
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
    const int64_t room = (int64_t)spec->micro_batch * spec->frames * spec->height * spec->width;
    LG_ASSERT(spec->height >= 1 && spec->width >= 1 && spec->frames >= 1 && spec->unit >= 1 &&
              spec->factor_time >= 1 && spec->micro_batch >= 1);
    *ret = b;
    if (wanted->n <= 1 && !strcmp(first, "square")) return 0;
    if (wanted->n == 1 && !strcmp(first, "ratio")) {
        LG_TRY(make_ratio(spec, &b));
    } else if (wanted->n == 1 && !strcmp(first, "pixart")) {
        LG_TRY(make_pixart(spec, &b));
    } else {
        for (int i = 0; i < wanted->n; i++) LG_TRY(add_named(wanted->v[i], spec, &b));
    }
    LG_TRY(check_sides(spec, &b));
    qsort(b.of, (size_t)b.n, sizeof *b.of, by_shape);
    for (int i = 0; i < b.n; i++) {
        int64_t fit = room / ((int64_t)b.of[i].frames * b.of[i].height * b.of[i].width);
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

/* Frames are left out where they were before there were clips. */
const char *lg_bucket_text(const struct lg_bucket *b, char ret[LG_BUCKET_TEXT_BYTES])
{
    if (b->frames > 1)
        snprintf(ret, LG_BUCKET_TEXT_BYTES, "%dx%dx%d", b->frames, b->height, b->width);
    else
        snprintf(ret, LG_BUCKET_TEXT_BYTES, "%dx%d", b->height, b->width);
    return ret;
}

void lg_buckets_print(const struct lg_buckets *b, char ret[LG_BUCKETS_TEXT_BYTES])
{
    size_t at = 0;
    ret[0] = 0;
    for (int i = 0; i < b->n; i++) {
        char shape[LG_BUCKET_TEXT_BYTES];
        at += (size_t)snprintf(ret + at, LG_BUCKETS_TEXT_BYTES - at, "%s%s*%d", i ? "," : "",
                               lg_bucket_text(&b->of[i], shape), b->of[i].rows);
    }
    LG_ASSERT(at < LG_BUCKETS_TEXT_BYTES);
}

int lg_buckets_parse(const char *text, struct lg_buckets *ret)
{
    struct lg_buckets b = {0};
    for (const char *at = text; *at;) {
        struct lg_bucket k = {.frames = 1};
        int used = read_shape(at, &k), rows = 0;
        bool well = used && b.n < LG_BUCKETS_MAX &&
                    sscanf(at + used, "*%6d%n", &k.rows, &rows) == 1 && k.rows >= 1;
        used += rows;
        at += used;
        well = well && (*at == ',' ? at[1] != 0 : *at == 0);
        if (!well) return LG_FAIL(LG_ERR_CORRUPT, "buckets \"%.60s\" are none", text);
        b.of[b.n++] = k;
        at += *at == ',';
    }
    *ret = b;
    return 0;
}
