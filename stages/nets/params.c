/* Parameter tables: building, initial values, loading.
 *
 * Design: the table is plain data. A parameter's place in the flat buffer is decided when it is
 * added; nothing moves afterwards. Every function that fills a buffer works on a range of it, so
 * that the owner of a shard touches its own part alone; the whole is the range [0, count).
 *
 * Invariants: offsets grow with the index; count is a multiple of LG_PARAM_ALIGN and at least the
 * end of the last parameter. */
#include "stages/nets/params.h"
#include "base/heartbeat.h"
#include "base/philox.h"
#include "base/pieces.h"
#include "stages/nets/sincos.h"
#include "stages/nets/weights.h"
#include <fnmatch.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { DRAW_COUNT = 1 << 22 }; /* values between two heartbeats */

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Room for one more in an array that doubles: its capacity are the powers of two. */
static void *grown(void *array, int n, size_t each)
{
    if (n & (n - 1)) return array;
    array = realloc(array, (size_t)(n ? 2 * n : 1) * each);
    LG_ASSERT(array);
    return array;
}

static void set_count(lg_params *t, size_t count)
{
    t->count = count;
    if (!t->n_units) return;
    struct lg_param_unit *last = &t->unit[t->n_units - 1];
    last->count = count - last->first;
}

void lg_params_begin_unit(lg_params *t, const char *name_fmt, ...)
{
    LG_ASSERT(t->n_units || !t->n);
    set_count(t, round_up(t->count, LG_UNIT_ALIGN));
    t->unit = grown(t->unit, t->n_units, sizeof *t->unit);
    struct lg_param_unit *u = &t->unit[t->n_units++];
    *u = (struct lg_param_unit){.first = t->count};
    va_list ap;
    va_start(ap, name_fmt);
    int n = vsnprintf(u->name, sizeof u->name, name_fmt, ap);
    va_end(ap);
    LG_ASSERT(n > 0 && (size_t)n < sizeof u->name);
}

static int add_at(lg_params *t, const struct lg_param *spec, size_t offset)
{
    LG_ASSERT(spec->rank >= 1 && spec->rank <= LG_PARAM_RANK_MAX);
    LG_ASSERT(lg_params_find(t, spec->name) < 0);
    LG_ASSERT(spec->layout == LG_LAYOUT_FILE || spec->rank >= 4);
    t->p = grown(t->p, t->n, sizeof *t->p);
    struct lg_param *p = &t->p[t->n];
    *p = *spec;
    p->offset = offset;
    p->unit = t->n_units - 1;
    p->count = 1;
    for (int i = 0; i < p->rank; i++) {
        LG_ASSERT(p->dim[i] > 0);
        p->count *= (size_t)p->dim[i];
    }
    set_count(t, round_up(offset + p->count,
                          t->in_blocks ? (size_t)LG_ADAMW8_BLOCK : (size_t)LG_PARAM_ALIGN));
    t->trained = ++t->n;
    t->trained_units = t->n_units;
    t->trained_count = t->count;
    return t->n - 1;
}

int lg_params_add(lg_params *t, const struct lg_param *spec)
{
    return add_at(t, spec, t->count);
}

int lg_params_add_packed(lg_params *t, const struct lg_param *spec)
{
    LG_ASSERT(t->n > 0);
    const struct lg_param *last = &t->p[t->n - 1];
    int i = add_at(t, spec, last->offset + last->count);
    t->p[i].packed = true;
    return i;
}

lg_params lg_params_of_unit(const lg_params *t, int unit)
{
    const struct lg_param_unit *u = &t->unit[unit];
    lg_params ret = {.in_blocks = t->in_blocks};
    for (const struct lg_param *p = t->p; p < t->p + t->n; p++)
        if (p->offset >= u->first && p->offset - u->first < u->count)
            add_at(&ret, p, p->offset - u->first);
    return ret;
}

/* ---- groups ---- */

static int check_packed(const lg_params *t)
{
    for (int i = 1; i < t->n; i++) {
        const struct lg_param *p = &t->p[i], *before = p - 1;
        const struct lg_param_group *g = &t->group[p->group], *of = &t->group[before->group];
        if (!p->packed || g == of) continue;
        if (p->is_frozen != before->is_frozen)
            return LG_FAIL(LG_ERR_CONFIG,
                           "trainer.groups: %s and %s are one product; freeze both or neither",
                           before->name, p->name);
        if (p->is_frozen && (g->has_storage != of->has_storage || g->storage != of->storage))
            return LG_FAIL(LG_ERR_CONFIG,
                           "trainer.groups: %s and %s are one product; give both the same storage",
                           before->name, p->name);
        if (!p->is_frozen && t->in_blocks && p->offset % LG_ADAMW8_BLOCK)
            return LG_FAIL(LG_ERR_CONFIG,
                           "trainer.groups: %s and %s are one product, whose moments of 8 bits lie "
                           "in blocks of %d; give both the same factors and optimizer",
                           before->name, p->name, LG_ADAMW8_BLOCK);
    }
    return 0;
}

/* An optimizer of 8 bits makes codes of something. */
static int check_optimizers(const lg_params *t)
{
    for (int g = 1; g < t->n_groups; g++) {
        bool any = !t->group[g].has_optimizer || !t->group[g].is_8_bit;
        for (int i = 0; i < t->n && !any; i++)
            any = t->p[i].group == g && !t->p[i].is_frozen && lg_params_is_coded(t, i);
        if (!any)
            return LG_FAIL(LG_ERR_CONFIG,
                           "trainer.groups: \"%s\" has optimizer=adamw8bit, which is for tensors "
                           "of at least %d elements, of which it has none; leave it out",
                           t->group[g].pattern, LG_CODED_MIN);
    }
    return 0;
}

bool lg_params_in_blocks(const struct lg_params_grouping *g)
{
    bool any = g->is_8_bit;
    for (const char *const *text = g->texts; text && *text; text++) {
        struct lg_param_group group;
        any = any || (lg_param_group_parse(*text, &group) == 0 && group.is_8_bit);
    }
    lg_err_clear();
    return any;
}

/* The group that a text says, or, without one, that of all. */
static int make_group(const struct lg_params_grouping *all, const char *text,
                      struct lg_param_group *ret)
{
    *ret = (struct lg_param_group){.pattern = "*", .lr = 1, .decay = 1};
    if (text) LG_TRY(lg_param_group_parse(text, ret));
    if (!ret->has_optimizer) ret->is_8_bit = all->is_8_bit;
    return 0;
}

int lg_params_group(lg_params *t, const struct lg_params_grouping *all)
{
    int n = 0;
    while (all->texts && all->texts[n]) n++;
    free(t->group);
    t->group = calloc((size_t)n + 1, sizeof *t->group);
    LG_ASSERT(t->group);
    t->n_groups = n + 1;
    LG_TRY(make_group(all, NULL, &t->group[0]));
    for (int i = 0; i < t->n; i++) t->p[i].group = 0, t->p[i].is_frozen = t->p[i].is_fixed;
    for (int g = 1; g <= n; g++) {
        int fits = 0;
        LG_TRY(make_group(all, all->texts[g - 1], &t->group[g]));
        for (struct lg_param *p = t->p; p < t->p + t->n; p++) {
            if (fnmatch(t->group[g].pattern, p->name, 0)) continue;
            fits++;
            if (p->group) continue;
            p->group = g;
            p->is_frozen = p->is_fixed || t->group[g].is_frozen;
        }
        if (!fits)
            return LG_FAIL(LG_ERR_CONFIG,
                           "trainer.groups: \"%s\" fits none of the %d parameters; their names are "
                           "those of the checkpoint's model, as %s",
                           t->group[g].pattern, t->n, t->p[0].name);
    }
    LG_TRY(check_packed(t));
    LG_TRY(check_optimizers(t));
    return 0;
}

/* The units that have parameters of this kind, with these alone, behind what `to` has. */
static void take(const lg_params *from, bool frozen, lg_params *to)
{
    int unit = -1;
    for (const struct lg_param *p = from->p; p < from->p + from->n; p++) {
        if (p->is_frozen != frozen) continue;
        if (p->unit != unit)
            lg_params_begin_unit(to, "%s%s", from->unit[p->unit].name, frozen ? " frozen" : "");
        unit = p->unit;
        if (p->packed)
            lg_params_add_packed(to, p);
        else
            lg_params_add(to, p);
    }
}

int lg_params_split(lg_params *t)
{
    lg_params both = {.group = t->group, .n_groups = t->n_groups, .in_blocks = t->in_blocks};
    int frozen = 0;
    for (int i = 0; i < t->n; i++) frozen += t->p[i].is_frozen;
    if (!frozen) return 0;
    if (frozen == t->n)
        return LG_FAIL(LG_ERR_CONFIG,
                       "trainer.groups: everything is frozen; leave something to train");
    take(t, false, &both);
    const lg_params trained = both;
    take(t, true, &both);
    both.trained = trained.n;
    both.trained_units = trained.n_units;
    both.trained_count = both.unit[trained.n_units].first;
    free(t->p);
    free(t->unit);
    *t = both;
    return 0;
}

lg_params lg_params_trained(const lg_params *t)
{
    lg_params part = *t;
    part.n = t->trained;
    part.n_units = t->trained_units;
    part.count = t->trained_count;
    return part;
}

lg_params lg_params_frozen(const lg_params *t)
{
    lg_params part = *t;
    part.p += t->trained;
    part.n -= t->trained;
    part.unit = NULL;
    part.n_units = 0;
    return part;
}

size_t lg_params_group_end(const lg_params *t, size_t first, size_t end, int *ret_group)
{
    int i = 0;
    while (i + 1 < t->n && t->p[i + 1].offset <= first) i++;
    *ret_group = t->p[i].group;
    for (i++; i < t->n && t->p[i].offset < end; i++)
        if (t->p[i].group != *ret_group) return t->p[i].offset;
    return end;
}

/* ---- moments in blocks ---- */

/* The first parameter of the tensor that i is a part of. */
static int tensor_of(const lg_params *t, int i)
{
    while (t->p[i].packed) i--;
    return i;
}

size_t lg_params_in_tensor(const lg_params *t, int i)
{
    return t->p[i].offset - t->p[tensor_of(t, i)].offset;
}

bool lg_params_is_coded(const lg_params *t, int i)
{
    size_t count = 0;
    if (!t->in_blocks || (t->n_groups && !t->group[t->p[i].group].is_8_bit)) return false;
    i = tensor_of(t, i);
    do count += t->p[i++].count;
    while (i < t->n && t->p[i].packed);
    return count >= LG_CODED_MIN;
}

size_t lg_params_coded_end(const lg_params *t, size_t first, size_t end, bool *ret_coded)
{
    int i = 0;
    *ret_coded = false;
    if (!t->in_blocks) return end;
    while (i + 1 < t->n && t->p[i + 1].offset <= first) i++;
    *ret_coded = lg_params_is_coded(t, i);
    for (i++; i < t->n && t->p[i].offset < end; i++)
        if (lg_params_is_coded(t, i) != *ret_coded) return t->p[i].offset;
    return end;
}

void lg_params_free(lg_params *t)
{
    free(t->group);
    free(t->p);
    free(t->unit);
    *t = (lg_params){0};
}

int lg_params_find(const lg_params *t, const char *name)
{
    for (int i = 0; i < t->n; i++)
        if (!strcmp(t->p[i].name, name)) return i;
    return -1;
}

/* The part of parameter p that lies in [first, first + count): *ret_from is its first element
 * within p; returns how many. */
static size_t overlap(const struct lg_param *p, size_t first, size_t count, size_t *ret_from)
{
    size_t lo = LG_MAX(p->offset, first), hi = LG_MIN(p->offset + p->count, first + count);
    if (lo >= hi) return 0;
    *ret_from = lo - p->offset;
    return hi - lo;
}

static void fill_uniform(float *dst, size_t n, uint64_t seed, uint64_t name, uint64_t from,
                         double scale)
{
    lg_philox_out block = {{0}};
    for (size_t i = 0; i < n; i++) {
        uint64_t e = from + i;
        if (i == 0 || e % 4 == 0) block = lg_philox(seed, LG_PURPOSE_INIT, name, e / 4);
        dst[i] = (float)(scale * (2.0 * lg_uniform_f64(block.v[e % 4]) - 1.0));
    }
}

static void fill_normal(float *dst, size_t n, uint64_t seed, uint64_t name, uint64_t from,
                        double scale)
{
    lg_philox_normal_f32(dst, n, seed, LG_PURPOSE_INIT, name, from);
    for (size_t i = 0; i < n; i++) dst[i] = (float)(scale * dst[i]);
}

/* Elements [from, from + n) of p, in pieces; what an element is follows from its place. */
static void draw(const struct lg_param *p, uint64_t seed, float *dst, size_t from, size_t n)
{
    const uint64_t name = XXH3_64bits(p->name, strlen(p->name));
    for (size_t at = 0; at < n; at += DRAW_COUNT) {
        size_t piece = LG_MIN(n - at, (size_t)DRAW_COUNT);
        if (p->init == LG_INIT_NORMAL)
            fill_normal(dst + at, piece, seed, name, from + at, p->init_scale);
        else
            fill_uniform(dst + at, piece, seed, name, from + at, p->init_scale);
        lg_heartbeat();
    }
}

/* Elements [from, from + n) of a table of positions. */
static void fill_positions(const struct lg_param *p, float *dst, size_t from, size_t n)
{
    const int side = (int)lround(sqrt((double)p->dim[1])), D = (int)p->dim[2];
    const struct lg_grid grid = {.rows = side, .columns = side, .base = p->init_scale, .scale = 1};
    for (size_t i = 0; i < n; i++) {
        const size_t e = from + i;
        dst[i] = lg_sincos(&grid, D, e);
        if (i % DRAW_COUNT == 0) lg_heartbeat();
    }
}

/* By one thread. */
static void init_elements(const lg_params *t, uint64_t seed, float *dst, size_t first, size_t count)
{
    memset(dst, 0, count * sizeof *dst);
    for (int i = 0; i < t->n; i++) {
        const struct lg_param *p = &t->p[i];
        size_t from, n = overlap(p, first, count, &from);
        if (n == 0) continue;
        float *d = dst + (p->offset + from - first);
        switch (p->init) {
        case LG_INIT_ZERO:
            break;
        case LG_INIT_ONE:
            for (size_t e = 0; e < n; e++) d[e] = 1.0f;
            break;
        case LG_INIT_NORMAL:
        case LG_INIT_UNIFORM:
            draw(p, seed, d, from, n);
            break;
        case LG_INIT_SINCOS:
            fill_positions(p, d, from, n);
            break;
        }
    }
}

struct init_range {
    const lg_params *t;
    uint64_t seed;
    float *dst;
    size_t first;
};

static void init_piece(void *arg, size_t at, size_t n)
{
    const struct init_range *r = arg;
    init_elements(r->t, r->seed, r->dst + at, r->first + at, n);
}

void lg_params_init(const lg_params *t, uint64_t seed, float *dst, size_t first, size_t count)
{
    LG_ASSERT(first <= t->count && count <= t->count - first);
    struct init_range r = {.t = t, .seed = seed, .dst = dst, .first = first};
    lg_pieces_make(
        &(struct lg_pieces){.count = count, .piece = DRAW_COUNT, .make = init_piece, .arg = &r});
}

static void shape_text(char ret[96], int rank, const int64_t *dim)
{
    size_t n = 0;
    ret[0] = 0;
    for (int i = 0; i < rank && n < 80; i++)
        n += (size_t)snprintf(ret + n, 96 - n, "%s%lld", i ? ", " : "", (long long)dim[i]);
}

static bool shape_equal(const struct lg_param *p, const struct lg_st_entry *e)
{
    if (p->rank != e->rank) return false;
    for (int i = 0; i < p->rank; i++)
        if (p->dim[i] != e->dim[i]) return false;
    return true;
}

/* (Co, Ci, .. kh, kw) -> (Co, .. kh, kw, Ci). */
static void to_ohwi(const struct lg_param *p, const float *file, float *ret)
{
    int64_t co = p->dim[0], ci = p->dim[1], hw = (int64_t)p->count / (co * ci);
    for (int64_t o = 0; o < co; o++)
        for (int64_t k = 0; k < hw; k++)
            for (int64_t i = 0; i < ci; i++)
                ret[(o * hw + k) * ci + i] = file[(o * ci + i) * hw + k];
}

/* Elements [from, from + n) of p, in the buffer's order. */
static int read_param(const struct lg_param *p, const struct lg_st_entry *e, float *dst,
                      size_t from, size_t n)
{
    if (p->layout == LG_LAYOUT_FILE) return lg_st_read_f32(e, dst, from, n);
    float *tmp = malloc(2 * p->count * sizeof *tmp);
    LG_ASSERT(tmp);
    int rc = lg_st_read_f32(e, tmp, 0, p->count);
    if (rc == 0) {
        to_ohwi(p, tmp, tmp + p->count);
        memcpy(dst, tmp + p->count + from, n * sizeof *dst);
    }
    free(tmp);
    return rc;
}

static int check_extra(const lg_params *t, const lg_weights *w, const char *const *allowed)
{
    for (int i = 0; i < lg_weights_count(w); i++) {
        const char *name = lg_weights_at(w, i)->name;
        bool known = lg_params_find(t, name) >= 0;
        for (const char *const *a = allowed; !known && a && *a; a++)
            known = !strncmp(name, *a, strlen(*a));
        if (!known)
            return LG_FAIL(LG_ERR_MISMATCH,
                           "%s: tensor %s is none of this model's; is it a model of another kind "
                           "or depth than its config.json says?",
                           lg_weights_path(w), name);
    }
    return 0;
}

static int load_param(const struct lg_param *p, const lg_weights *w, float *dst, size_t first,
                      size_t count)
{
    const struct lg_st_entry *e = lg_weights_find(w, p->name);
    char want[96], have[96];
    shape_text(want, p->rank, p->dim);
    if (!e)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: tensor %s (%s) is missing", lg_weights_path(w),
                       p->name, want);
    if (!shape_equal(p, e)) {
        shape_text(have, e->rank, e->dim);
        return LG_FAIL(LG_ERR_MISMATCH, "%s: tensor %s has shape (%s), the model wants (%s)",
                       lg_weights_path(w), p->name, have, want);
    }
    if (e->dtype != LG_F32 && e->dtype != LG_F16 && e->dtype != LG_BF16)
        return LG_FAIL(LG_ERR_MISMATCH, "%s: tensor %s is %s; fp32, fp16 and bf16 can be read",
                       lg_weights_path(w), p->name, lg_dtype_name(e->dtype));
    size_t from, n = overlap(p, first, count, &from);
    if (n) LG_TRY(read_param(p, e, dst + (p->offset + from - first), from, n));
    return 0;
}

int lg_params_load(const lg_params *t, const char *path, const char *const *allowed_extra,
                   float *dst, size_t first, size_t count)
{
    LG_ASSERT(first <= t->count && count <= t->count - first);
    lg_weights *w = NULL;
    LG_TRY(lg_weights_open(path, &w));
    if (count) memset(dst, 0, count * sizeof *dst);
    int rc;
    LG_TRY_GOTO(rc, check_extra(t, w, allowed_extra), out);
    for (int i = 0; i < t->n; i++) {
        LG_TRY_GOTO(rc, load_param(&t->p[i], w, dst, first, count), out);
    }
out:
    lg_weights_close(&w);
    return rc;
}
