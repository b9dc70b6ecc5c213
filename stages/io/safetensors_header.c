/* Reading the header; see safetensors_header.h. Texts without their escapes and with a NUL never take
 * more room than in the header, quotes included, so one piece of memory of its size holds them all;
 * what is not written to is never there. */
#include "stages/io/safetensors_header.h"
#include "base/json.h"
#include <stdlib.h>
#include <string.h>

enum {
    SHAPE_RANK_MAX = 8,
    ENTRY_TOKENS_MAX = 128, /* of one tensor; its own keys need 24 at most */
};
#define INTEGER_MAX (UINT64_C(1) << 53) /* below it, sums of two are far from overflow */

static const struct {
    const char *name;
    lg_dtype dtype;
} types[] = {
    {"F32", LG_F32}, {"F64", LG_F64}, {"F16", LG_F16}, {"BF16", LG_BF16},
    {"I32", LG_I32}, {"U8", LG_U8},   {"I64", LG_I64},
};

struct parser {
    lg_json j;
    const struct lg_st_header_source *source;
    struct lg_st_header *h;
    size_t text_at, entry_capacity, metadata_capacity;
};

/* What one tensor's object says. */
struct description {
    const char *name;
    bool has_dtype, has_shape, has_offsets;
    lg_dtype dtype;
    int rank;
    uint64_t dim[SHAPE_RANK_MAX], begin, end;
};

const char *lg_st_type_name(lg_dtype t)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(types); i++)
        if (types[i].dtype == t) return types[i].name;
    return "?";
}

static const char *keep_text(struct parser *p)
{
    char *text = p->h->text + p->text_at;
    p->text_at += lg_json_text(&p->j, text) + 1;
    return text;
}

static int grow(struct parser *p, void **data, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity) return 0;
    size_t want = LG_MAX(2 * *capacity, (size_t)64);
    void *grown = realloc(*data, want * size);
    if (!grown) return LG_FAIL(LG_ERR_NOSPACE, "%s: no memory for its header", p->source->label);
    *data = grown;
    *capacity = want;
    return 0;
}

static int corrupt(const struct parser *p, const char *name, const char *what)
{
    return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" %s", p->source->label, name, what);
}

/* The next token as a whole number. */
static bool take_number(struct parser *p, uint64_t *ret)
{
    return lg_json_next(&p->j) == 0 && lg_json_u64(&p->j, ret) && *ret < INTEGER_MAX;
}

static int take_dtype(struct parser *p, struct description *d)
{
    LG_TRY(lg_json_next(&p->j));
    if (p->j.kind != LG_JSON_STRING) return corrupt(p, d->name, "has no dtype");
    for (size_t i = 0; i < LG_ARRAY_LEN(types); i++)
        if (lg_json_is(&p->j, types[i].name)) {
            d->dtype = types[i].dtype;
            d->has_dtype = true;
            return 0;
        }
    return LG_FAIL(LG_ERR_CORRUPT,
                   "%s: tensor \"%s\" has dtype \"%.*s\"; F32, F64, F16, BF16, I32, I64 and U8 are "
                   "supported",
                   p->source->label, d->name, (int)LG_MIN(p->j.bytes, (size_t)32), p->j.text);
}

static int take_shape(struct parser *p, struct description *d)
{
    LG_TRY(lg_json_next(&p->j));
    if (p->j.kind != LG_JSON_ARRAY) return corrupt(p, d->name, "has no shape");
    for (;;) {
        uint64_t v;
        LG_TRY(lg_json_next(&p->j));
        if (p->j.kind == LG_JSON_ARRAY_END) break;
        if (d->rank == SHAPE_RANK_MAX)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" has more than %d dimensions",
                           p->source->label, d->name, SHAPE_RANK_MAX);
        if (!lg_json_u64(&p->j, &v) || v >= INTEGER_MAX)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\": dimension %d is impossible",
                           p->source->label, d->name, d->rank);
        d->dim[d->rank++] = v;
    }
    d->has_shape = true;
    return 0;
}

static int take_offsets(struct parser *p, struct description *d)
{
    bool good = lg_json_next(&p->j) == 0 && p->j.kind == LG_JSON_ARRAY &&
                take_number(p, &d->begin) && take_number(p, &d->end) && d->end >= d->begin &&
                lg_json_next(&p->j) == 0 && p->j.kind == LG_JSON_ARRAY_END;
    if (!good) return corrupt(p, d->name, "has no usable data_offsets");
    d->has_offsets = true;
    return 0;
}

/* Keys that are not the format's are passed over. */
static int take_description(struct parser *p, struct description *d)
{
    for (;;) {
        LG_TRY(lg_json_next(&p->j));
        if (p->j.kind == LG_JSON_OBJECT_END) break;
        bool dtype = lg_json_is(&p->j, "dtype"), shape = lg_json_is(&p->j, "shape"),
             offsets = lg_json_is(&p->j, "data_offsets");
        if ((dtype && d->has_dtype) || (shape && d->has_shape) || (offsets && d->has_offsets))
            return corrupt(p, d->name, "says something twice");
        if (dtype)
            LG_TRY(take_dtype(p, d));
        else if (shape)
            LG_TRY(take_shape(p, d));
        else if (offsets)
            LG_TRY(take_offsets(p, d));
        else
            LG_TRY(lg_json_skip(&p->j));
    }
    if (!d->has_dtype) return corrupt(p, d->name, "has no dtype");
    if (!d->has_shape) return corrupt(p, d->name, "has no shape");
    if (!d->has_offsets) return corrupt(p, d->name, "has no usable data_offsets");
    return 0;
}

/* Shape and type must give the bytes between the offsets. */
static int add_entry(struct parser *p, const struct description *d)
{
    struct lg_st_header *h = p->h;
    uint64_t bytes = lg_dtype_bytes(d->dtype);
    struct lg_st_entry e = {.name = d->name, .dtype = d->dtype, .rank = d->rank};
    for (int i = 0; i < d->rank; i++) {
        if (__builtin_mul_overflow(bytes, d->dim[i], &bytes))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\": dimension %d is impossible",
                           p->source->label, d->name, i);
        e.dim[i] = (int64_t)d->dim[i];
    }
    if (d->end - d->begin != bytes)
        return LG_FAIL(
            LG_ERR_CORRUPT,
            "%s: tensor \"%s\" needs %llu bytes by its shape, its data_offsets give %llu",
            p->source->label, d->name, (unsigned long long)bytes,
            (unsigned long long)(d->end - d->begin));
    e.bytes = bytes;
    e.file_offset = p->source->data_start + d->begin;
    if (h->count == LG_ST_ENTRIES_MAX)
        return LG_FAIL(LG_ERR_CORRUPT, "%s has more than %d tensors", p->source->label,
                       LG_ST_ENTRIES_MAX);
    LG_TRY(grow(p, (void **)&h->entry, &p->entry_capacity, (size_t)h->count + 1, sizeof e));
    h->entry[h->count++] = e;
    return 0;
}

static int take_tensor(struct parser *p)
{
    struct description d = {.name = keep_text(p)};
    p->j.left = ENTRY_TOKENS_MAX;
    LG_TRY(lg_json_next(&p->j));
    if (p->j.kind != LG_JSON_OBJECT)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" in the header is not an object",
                       p->source->label, d.name);
    LG_TRY(take_description(p, &d));
    LG_TRY(add_entry(p, &d));
    return 0;
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int take_metadata(struct parser *p)
{
    struct lg_st_header *h = p->h;
    if (h->metadata)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: __metadata__ appears twice", p->source->label);
    LG_TRY(grow(p, (void **)&h->metadata, &p->metadata_capacity, 1, 2 * sizeof *h->metadata));
    p->j.left = 2 * LG_ST_METADATA_MAX + 2;
    LG_TRY(lg_json_next(&p->j));
    if (p->j.kind != LG_JSON_OBJECT)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: __metadata__ is not an object", p->source->label);
    for (;;) {
        LG_TRY(lg_json_next(&p->j));
        if (p->j.kind == LG_JSON_OBJECT_END) break;
        LG_TRY(grow(p, (void **)&h->metadata, &p->metadata_capacity, h->n_metadata + 1,
                    2 * sizeof *h->metadata));
        const char **pair = h->metadata + 2 * h->n_metadata;
        pair[0] = keep_text(p);
        LG_TRY(lg_json_next(&p->j));
        if (p->j.kind != LG_JSON_STRING)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: __metadata__.%s is not a string", p->source->label,
                           pair[0]);
        pair[1] = keep_text(p);
        h->n_metadata++;
    }
    if (h->n_metadata) qsort(h->metadata, h->n_metadata, 2 * sizeof *h->metadata, compare_keys);
    for (size_t i = 1; i < h->n_metadata; i++)
        if (!strcmp(h->metadata[2 * i], h->metadata[2 * i - 2]))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: __metadata__.%s appears twice", p->source->label,
                           h->metadata[2 * i]);
    return 0;
}

static int take_header(struct parser *p)
{
    LG_TRY(lg_json_next(&p->j));
    if (p->j.kind != LG_JSON_OBJECT) return lg_json_fail(&p->j, "its header is no JSON object");
    for (;;) {
        p->j.left = 1;
        LG_TRY(lg_json_next(&p->j));
        if (p->j.kind == LG_JSON_OBJECT_END) break;
        if (lg_json_is(&p->j, "__metadata__"))
            LG_TRY(take_metadata(p));
        else
            LG_TRY(take_tensor(p));
    }
    LG_TRY(lg_json_next(&p->j)); /* the end */
    return 0;
}

int lg_st_header_parse(const struct lg_st_header_source *source, struct lg_st_header *ret)
{
    struct parser p = {.source = source, .h = ret};
    *ret = (struct lg_st_header){.text = malloc(source->bytes + 1)};
    if (!ret->text) return LG_FAIL(LG_ERR_NOSPACE, "%s: no memory for its header", source->label);
    lg_json_open(&p.j, &(struct lg_json_source){.label = source->label,
                                                .data = source->json,
                                                .bytes = source->bytes,
                                                .origin = source->data_start - source->bytes});
    LG_TRY(take_header(&p));
    return 0;
}

void lg_st_header_free(struct lg_st_header *h)
{
    free(h->entry);
    free(h->metadata);
    free(h->text);
    *h = (struct lg_st_header){0};
}

const char *lg_st_header_metadata(const struct lg_st_header *h, const char *key)
{
    const char **pair = h->n_metadata ? bsearch(&key, h->metadata, h->n_metadata,
                                                2 * sizeof *h->metadata, compare_keys)
                                      : NULL;
    return pair ? pair[1] : NULL;
}
