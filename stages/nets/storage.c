/* See storage.h. */
#include "stages/nets/storage.h"
#include <string.h>

enum { ALIGN = 64 };

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t scale_bytes(lg_dtype type)
{
    return type == LG_F64 ? sizeof(double) : sizeof(float);
}

lg_storage lg_storage_of(const char *word)
{
    lg_storage ret = LG_STORAGE_AUTO;
    LG_ASSERT(lg_storage_find(word, &ret));
    return ret;
}

lg_rows8 lg_storage_format(lg_storage storage)
{
    LG_ASSERT(storage != LG_STORAGE_AUTO);
    return storage == LG_STORAGE_FP8 ? LG_ROWS8_FP8 : LG_ROWS8_INT8;
}

/* Parameters [i, ret) are one tensor. */
static int tensor_end(const lg_params *t, int i)
{
    for (i++; i < t->n && t->p[i].packed;) i++;
    return i;
}

static lg_storage storage_of(const lg_params *t, int i, lg_storage all)
{
    const struct lg_param_group *g = t->n_groups ? &t->group[t->p[i].group] : NULL;
    return g && g->has_storage ? g->storage : all;
}

void lg_storage_set(lg_params *t, lg_storage all, int first)
{
    for (int i = first, end; i < t->n; i = end) {
        const lg_storage storage = storage_of(t, i, all);
        size_t elements = 0;
        bool takes = storage != LG_STORAGE_AUTO;
        end = tensor_end(t, i);
        for (int k = i; k < end; k++) {
            elements += t->p[k].count;
            takes = takes && t->p[k].is_block_matrix;
        }
        for (int k = i; k < end; k++) {
            t->p[k].in_8_bits = takes && elements >= LG_STORAGE_MIN;
            if (t->p[k].in_8_bits) t->p[k].format = lg_storage_format(storage);
        }
    }
}

bool lg_storage_any(const lg_params *t)
{
    for (int i = 0; i < t->n; i++)
        if (t->p[i].in_8_bits) return true;
    return false;
}

/* ---- where things lie ---- */

/* A unit's parameters and elements; those of a table without units: all. */
struct span {
    int from, to;
    size_t first, count;
};

static struct span span_of(const lg_params *t, int unit)
{
    struct span s = {.to = t->n, .count = t->count};
    if (!t->n_units) return s;
    s.first = t->unit[unit].first;
    s.count = t->unit[unit].count;
    while (s.from < t->n && t->p[s.from].unit != unit) s.from++;
    for (s.to = s.from; s.to < t->n && t->p[s.to].unit == unit;) s.to++;
    return s;
}

static bool has_codes(const lg_params *t, const struct span *s)
{
    for (int i = s->from; i < s->to; i++)
        if (t->p[i].in_8_bits) return true;
    return false;
}

/* The place of one of parameters [i, end), which are one tensor that begins at `at`; returns where it ends. */
static size_t place_tensor(const lg_params *t, int i, int end, size_t at, lg_dtype type, int param,
                           struct lg_stored *ret)
{
    const bool coded = t->p[i].in_8_bits;
    const size_t element = coded ? 1 : lg_dtype_bytes(type);
    size_t scale_at = at, rows = 0;
    for (int k = i; k < end; k++) rows += (size_t)t->p[k].dim[0];
    if (coded) at = aligned(at + rows * scale_bytes(type));
    for (int k = i; k < end; k++) {
        if (k == param) *ret = (struct lg_stored){.at = at, .scale_at = coded ? scale_at : 0};
        at += t->p[k].count * element;
        scale_at += (size_t)t->p[k].dim[0] * scale_bytes(type);
    }
    return at;
}

/* The place of a parameter of the unit; -1: of none. Returns the unit's bytes. */
static size_t place(const lg_params *t, const struct span *s, lg_dtype type, int param,
                    struct lg_stored *ret)
{
    size_t at = 0;
    if (!has_codes(t, s)) {
        if (param >= 0) ret->at = (t->p[param].offset - s->first) * lg_dtype_bytes(type);
        return s->count * lg_dtype_bytes(type);
    }
    for (int i = s->from, end; i < s->to; i = end) {
        end = tensor_end(t, i);
        at = place_tensor(t, i, end, aligned(at), type, param, ret);
    }
    return aligned(at);
}

struct lg_stored lg_stored_place(const lg_params *t, int param, lg_dtype type)
{
    struct lg_stored ret = {0};
    const struct span s = span_of(t, t->p[param].unit);
    place(t, &s, type, param, &ret);
    return ret;
}

bool lg_stored_has_codes(const lg_params *t, int unit)
{
    const struct span s = span_of(t, unit);
    return has_codes(t, &s);
}

size_t lg_stored_unit_bytes(const lg_params *t, int unit, lg_dtype type)
{
    const struct span s = span_of(t, unit);
    return place(t, &s, type, -1, NULL);
}

size_t lg_stored_unit_at(const lg_params *t, int unit, lg_dtype type)
{
    size_t at = 0;
    for (int u = 0; u < unit; u++) at += lg_stored_unit_bytes(t, u, type);
    return at;
}

size_t lg_stored_bytes(const lg_params *t, lg_dtype type)
{
    return t->n_units ? lg_stored_unit_at(t, t->n_units, type) : lg_stored_unit_bytes(t, 0, type);
}
