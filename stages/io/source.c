/* A data set: opening it, its parts, its order; see source.h. The index is source_index.c, bytes are source_bytes.c, an item's contents
 * source_item.c, sizes source_sizes.c, the choices that make a sample of an item source_sample.c. */
#include "stages/io/source.h"
#include "base/heartbeat.h"
#include "stages/io/source_parts.h"
#include "stages/io/source_private.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int mix(lg_source *s)
{
    struct lg_mixture_source of[LG_MIXTURE_MAX];
    const int n = s->index.n_sources;
    for (int i = 0; i < n; i++) {
        const struct lg_index_source *x = &s->index.source[i];
        of[i] = (struct lg_mixture_source){
            .items = x->count, .repeats = x->repeats, .weight = x->weight};
        s->stands += x->count * x->repeats;
    }
    LG_TRY(lg_mixture_make(of, n, &s->mixture));
    return 0;
}

int lg_source_open_all(const struct lg_source_spec *spec, int n,
                       const struct lg_source_options *options, lg_source **ret)
{
    LG_ASSERT(n >= 1 && n <= LG_MIXTURE_MAX);
    lg_source *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory to open %s", spec->path);
    for (int i = 0; i < LG_SOURCE_FDS_MAX; i++) s->open[i].fd = -1;
    if (options) s->options = *options;
    int rc;
    LG_TRY_GOTO(rc, lg_index_build(spec, n, &s->options, &s->index), fail);
    LG_TRY_GOTO(rc, mix(s), fail);
    *ret = s;
    return 0;
fail:
    lg_source_close(&s);
    return rc;
}

int lg_source_open(const char *path, const struct lg_source_options *options, lg_source **ret)
{
    LG_TRY(
        lg_source_open_all(&(struct lg_source_spec){.path = path, .repeats = 1}, 1, options, ret));
    return 0;
}

static_assert((int)LG_DATA_SOURCES_MAX <= (int)LG_MIXTURE_MAX, "as many as a config may name");

int lg_source_open_data(const lg_config *c, const struct lg_source_options *options,
                        lg_source **ret)
{
    const struct lg_data_sources *l = &c->data_source;
    struct lg_source_spec spec[LG_MIXTURE_MAX] = {{.path = c->data_path, .repeats = 1}};
    for (int i = 0; i < l->n; i++)
        spec[i] = (struct lg_source_spec){
            .path = l->v[i].path, .weight = l->v[i].weight, .repeats = (uint64_t)l->v[i].repeats};
    struct lg_source_options o = options ? *options : (struct lg_source_options){0};
    o.clips |= c->data_frames > 1;
    LG_TRY(lg_source_open_all(spec, LG_MAX(l->n, 1), &o, ret));
    return 0;
}

void lg_source_close(lg_source **s)
{
    if (!*s) return;
    for (int i = 0; i < LG_SOURCE_FDS_MAX; i++)
        if ((*s)->open[i].fd >= 0) close((*s)->open[i].fd);
    lg_index_free(&(*s)->index);
    lg_item_free(&(*s)->head);
    free(*s);
    *s = NULL;
}

const struct lg_left_out *lg_source_left_out(const lg_source *s)
{
    return &s->index.left_out;
}

uint64_t lg_source_count(const lg_source *s)
{
    return s->index.count;
}

uint64_t lg_source_hash(const lg_source *s)
{
    return s->index.hash;
}

int lg_source_parts(const lg_source *s)
{
    return s->index.n_sources;
}

struct lg_source_part lg_source_part(const lg_source *s, int i)
{
    LG_ASSERT(i >= 0 && i < s->index.n_sources);
    const struct lg_index_source *x = &s->index.source[i];
    return (struct lg_source_part){.first = x->first,
                                   .count = x->count,
                                   .repeats = x->repeats,
                                   .share = lg_mixture_share(&s->mixture, i)};
}

int lg_source_part_of(const lg_source *s, uint64_t item)
{
    return lg_index_source_of(&s->index, item);
}

const struct lg_mixture *lg_source_mixture(const lg_source *s)
{
    return &s->mixture;
}

/* The sizes of all that stand in an epoch: each source's items, as often as they are repeated. */
static struct lg_item_size *stand_sizes(const lg_source *s, const struct lg_item_size *size)
{
    struct lg_item_size *all = calloc(s->stands, sizeof *all), *to = all;
    for (int i = 0; all && i < s->index.n_sources; i++) {
        const struct lg_index_source *x = &s->index.source[i];
        for (uint64_t k = 0; k < x->repeats; k++, to += x->count)
            memcpy(to, size + x->first, x->count * sizeof *size);
        lg_heartbeat();
    }
    return all;
}

int lg_source_order(const lg_source *s, const struct lg_order_spec *spec, lg_order **ret)
{
    struct lg_order_spec all = *spec;
    struct lg_item_size *size = stand_sizes(s, spec->size);
    if (!size) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the sizes of the pictures");
    all.size = size;
    all.count = s->stands;
    int rc = lg_order_make(&all, ret);
    free(size);
    LG_TRY(rc);
    return 0;
}

/* Which item stands there? */
static uint64_t item_of(const lg_source *s, uint64_t stand)
{
    int i = 0;
    for (; stand >= s->index.source[i].count * s->index.source[i].repeats; i++)
        stand -= s->index.source[i].count * s->index.source[i].repeats;
    return s->index.source[i].first + stand % s->index.source[i].count;
}

struct lg_order_place lg_source_place(const lg_source *s, const struct lg_sample_rule *rule,
                                      uint64_t n)
{
    if (!rule->order) {
        const struct lg_mixture_key key = {.seed = rule->seed,
                                           .first = rule->first,
                                           .epoch = rule->epoch,
                                           .no_shuffle = rule->no_shuffle};
        const struct lg_mixture_place at = lg_mixture_at(&s->mixture, &key, n);
        return (struct lg_order_place){.item = at.item, .epoch = at.epoch};
    }
    struct lg_order_place place =
        lg_order_at(rule->order,
                    &(struct lg_order_key){.seed = rule->seed,
                                           .first = rule->first,
                                           .epoch = rule->epoch,
                                           .no_shuffle = rule->no_shuffle},
                    n);
    if (place.item != LG_ITEM_ABSENT) place.item = item_of(s, place.item);
    return place;
}

bool lg_source_has_latents(const lg_source *s)
{
    return s->index.n_of_kind[LG_MEMBER_LATENT] > 0;
}

bool lg_source_has_clips(const lg_source *s)
{
    return s->index.n_of_kind[LG_MEMBER_CLIP] > 0;
}

int lg_source_parts_save(const lg_source *s, uint64_t hash, const char *path)
{
    struct lg_parts there = {0}, p;
    int rc = lg_parts_load(path, hash, &there);
    lg_parts_free(&there);
    lg_err_clear();
    if (rc == 0) return 0;
    LG_TRY(lg_parts_of(&s->index, &p));
    rc = lg_parts_save(&p, hash, path);
    lg_parts_free(&p);
    LG_TRY(rc);
    return 0;
}

void lg_source_parts_compare(const lg_source *s, const char *path, uint64_t hash, char *ret,
                             size_t bytes)
{
    struct lg_parts was = {0}, is = {0};
    *ret = 0;
    if (lg_parts_load(path, hash, &was) == 0 && lg_parts_of(&s->index, &is) == 0)
        lg_parts_compare(&was, &is, ret, bytes);
    lg_parts_free(&was);
    lg_parts_free(&is);
    lg_err_clear();
}
