/* The parts of a data set; see source_parts.h. */
#include "stages/io/source_parts.h"
#include "base/fs.h"
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { LIST_BYTES_MAX = 64 << 20, NAME_SHOWN = 60 };

void lg_parts_free(struct lg_parts *p)
{
    for (size_t i = 0; i < p->count; i++) free(p->at[i].name);
    free(p->at);
    *p = (struct lg_parts){0};
}

static int add(struct lg_parts *p, const struct lg_part *part)
{
    if (p->count == p->capacity) {
        size_t capacity = LG_MAX(2 * p->capacity, (size_t)64);
        struct lg_part *more = realloc(p->at, capacity * sizeof *more);
        if (!more) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the parts of the data set");
        p->at = more;
        p->capacity = capacity;
    }
    p->at[p->count] = *part;
    p->at[p->count].name = strdup(part->name);
    if (!p->at[p->count].name)
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for the parts of the data set");
    p->count++;
    return 0;
}

/* Items [first, last) of the index, all of one shard. */
static uint64_t hash_items(const struct lg_index *x, size_t first, size_t last, XXH3_state_t *h)
{
    XXH3_64bits_reset(h);
    for (size_t i = first; i < last; i++) {
        const char *key = x->names + x->entry[i].key_at;
        XXH3_64bits_update(h, key, strlen(key) + 1);
        for (size_t k = x->entry[i].first_member; k < x->entry[i + 1].first_member; k++) {
            uint32_t member[2] = {x->member[k].kind, x->member[k].bytes};
            XXH3_64bits_update(h, member, sizeof member);
        }
    }
    return XXH3_64bits_digest(h);
}

static int list_source(const struct lg_index *x, const struct lg_index_source *s, XXH3_state_t *h,
                       struct lg_parts *ret)
{
    const size_t last = s->first + s->count;
    for (size_t at = s->first, end; at < last; at = end) {
        size_t shard = x->entry[at].shard;
        bool folder = x->shard[shard].is_folder;
        for (end = at; end < last && x->entry[end].shard == shard;)
            if (++end - at == LG_PART_ITEMS && folder) break;
        struct lg_part p = {.items = end - at, .kind = folder ? LG_PART_STRETCH : LG_PART_SHARD};
        p.hash = hash_items(x, at, end, h);
        p.name = folder ? x->names + x->entry[at].key_at : (char *)lg_index_shard_name(x, shard);
        LG_TRY(add(ret, &p));
    }
    return 0;
}

static int list(const struct lg_index *x, XXH3_state_t *h, struct lg_parts *ret)
{
    for (int i = 0; i < x->n_sources; i++) {
        const struct lg_index_source *s = &x->source[i];
        char name[32];
        snprintf(name, sizeof name, "data.source[%d]", i);
        XXH3_64bits_reset(h);
        XXH3_64bits_update(h, &s->repeats, sizeof s->repeats);
        XXH3_64bits_update(h, &s->weight, sizeof s->weight);
        const struct lg_part p = {
            .name = name, .hash = XXH3_64bits_digest(h), .kind = LG_PART_SOURCE};
        if (x->n_sources > 1 || s->repeats > 1) LG_TRY(add(ret, &p));
        LG_TRY(list_source(x, s, h, ret));
    }
    return 0;
}

int lg_parts_of(const struct lg_index *x, struct lg_parts *ret)
{
    struct lg_parts p = {0};
    XXH3_state_t *h = XXH3_createState();
    int rc =
        h ? list(x, h, &p) : LG_FAIL(LG_ERR_NOSPACE, "no memory for the parts of the data set");
    XXH3_freeState(h);
    if (rc < 0) {
        lg_parts_free(&p);
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    *ret = p;
    return 0;
}

/* ---- comparing ---- */

static bool has(const struct lg_parts *p, size_t from, const char *name)
{
    for (size_t i = from; i < p->count; i++)
        if (!strcmp(p->at[i].name, name)) return true;
    return false;
}

void lg_parts_compare(const struct lg_parts *was, const struct lg_parts *is, char *ret,
                      size_t bytes)
{
    size_t i = 0;
    *ret = 0;
    while (i < was->count && i < is->count && !strcmp(was->at[i].name, is->at[i].name) &&
           was->at[i].items == is->at[i].items && was->at[i].hash == is->at[i].hash)
        i++;
    const struct lg_part *a = i < was->count ? &was->at[i] : NULL;
    const struct lg_part *b = i < is->count ? &is->at[i] : NULL;
    if (!a && !b) return;
    if ((a && a->kind == LG_PART_SOURCE) || (b && b->kind == LG_PART_SOURCE))
        snprintf(ret, bytes,
                 "first difference: the weight or the repeats of %.*s, or what is before it",
                 NAME_SHOWN, a && a->kind == LG_PART_SOURCE ? a->name : b->name);
    else if ((a && a->kind == LG_PART_STRETCH) || (b && b->kind == LG_PART_STRETCH))
        snprintf(ret, bytes, "first difference: in the files from %.*s on", NAME_SHOWN,
                 a ? a->name : b->name);
    else if (a && b && !strcmp(a->name, b->name))
        snprintf(ret, bytes, "first difference: shard %.*s (%" PRIu64 " items, now %" PRIu64 ")",
                 NAME_SHOWN, a->name, a->items, b->items);
    else if (a && (!b || !has(is, i, a->name)))
        snprintf(ret, bytes, "first difference: shard %.*s is gone", NAME_SHOWN, a->name);
    else
        snprintf(ret, bytes, "first difference: shard %.*s is new", NAME_SHOWN, b->name);
}

/* ---- the file ---- */

static void add_hex(cJSON *to, const char *key, uint64_t v)
{
    char hex[17];
    snprintf(hex, sizeof hex, "%016" PRIx64, v);
    cJSON_AddStringToObject(to, key, hex);
}

static const char *const key_of_kind[] = {
    [LG_PART_SHARD] = "shard", [LG_PART_STRETCH] = "from", [LG_PART_SOURCE] = "source"};

int lg_parts_save(const struct lg_parts *p, uint64_t hash, const char *path)
{
    cJSON *j = cJSON_CreateObject(), *parts = cJSON_AddArrayToObject(j, "parts");
    uint64_t items = 0;
    for (size_t i = 0; i < p->count; i++) {
        cJSON *e = cJSON_CreateObject();
        cJSON_AddStringToObject(e, key_of_kind[p->at[i].kind], p->at[i].name);
        cJSON_AddNumberToObject(e, "items", (double)p->at[i].items);
        add_hex(e, "hash", p->at[i].hash);
        cJSON_AddItemToArray(parts, e);
        items += p->at[i].items;
    }
    add_hex(j, "hash", hash);
    cJSON_AddNumberToObject(j, "items", (double)items);
    char *text = cJSON_Print(j);
    cJSON_Delete(j);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %s", path);
    int rc = lg_publish_file(path, text, strlen(text));
    free(text);
    LG_TRY(rc);
    return 0;
}

static int get_hex(const cJSON *j, uint64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, "hash");
    char *end = NULL;
    if (cJSON_IsString(v)) *ret = strtoull(v->valuestring, &end, 16);
    return end && !*end && end - v->valuestring == 16 ? 0 : LG_ERR_CORRUPT;
}

static int read_part(const cJSON *e, struct lg_parts *to)
{
    const cJSON *name = NULL, *items = cJSON_GetObjectItemCaseSensitive(e, "items");
    struct lg_part p = {0};
    for (size_t k = 0; k < LG_ARRAY_LEN(key_of_kind) && !name; k++) {
        name = cJSON_GetObjectItemCaseSensitive(e, key_of_kind[k]);
        p.kind = (enum lg_part_kind)k;
    }
    if (!cJSON_IsString(name) || !cJSON_IsNumber(items) || !(items->valuedouble >= 0) ||
        items->valuedouble > 9e15 || get_hex(e, &p.hash) < 0)
        return LG_FAIL(LG_ERR_CORRUPT, "data.json has no list of parts");
    p.name = name->valuestring;
    p.items = (uint64_t)items->valuedouble;
    return add(to, &p);
}

int lg_parts_load(const char *path, uint64_t hash, struct lg_parts *ret)
{
    struct lg_parts p = {0};
    char *text;
    size_t bytes;
    uint64_t of = 0;
    LG_TRY(lg_read_file(path, LIST_BYTES_MAX, &text, &bytes));
    cJSON *j = cJSON_ParseWithLength(text, bytes);
    const cJSON *parts = cJSON_GetObjectItemCaseSensitive(j, "parts"), *e;
    int rc = get_hex(j, &of) < 0 || !cJSON_IsArray(parts)
                 ? LG_FAIL(LG_ERR_CORRUPT, "%s is no list of a data set's parts", path)
                 : 0;
    free(text);
    if (rc == 0 && of != hash) rc = LG_ERR_MISMATCH;
    cJSON_ArrayForEach(e, parts) if (rc == 0) rc = read_part(e, &p);
    cJSON_Delete(j);
    if (rc < 0)
        lg_parts_free(&p);
    else
        *ret = p;
    return rc;
}
