/* A look at a data set; see look.h.
 *
 * One pass over the items in their order: each is read as a loader reads it, its picture decoded at an eighth of the size
 * where the format can do that. What is kept of an item are its size, a hash of its picture and the length of its
 * captions: about 50 bytes. */
#include "stages/loader/look.h"
#include "base/bytes.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/printable.h"
#include "config/texts.h"
#include "stages/io/source.h"
#include "stages/io/tokenizer.h"
#include "stages/loader/look_clips.h"
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAMED_MAX = 20, TOKENS_MAX = 4096, LOOK_SIZE = 1024 };

struct lg_clip_rate lg_loader_rate(const lg_config *c)
{
    return (struct lg_clip_rate){.fps = c->data_fps, .stride = (int)c->data_stride};
}

int lg_loader_order(const lg_config *c, const lg_plan *p, const lg_source *s,
                    const struct lg_item_size *size, lg_order **ret)
{
    LG_TRY(lg_source_order(
        s,
        &(struct lg_order_spec){
            .buckets = &p->buckets,
            .size = size,
            .rate = lg_loader_rate(c),
            .ranks = (uint64_t)(p->hosts * p->instances[LG_ROLE_trainer] / p->sequence),
            .micros = (uint64_t)(p->rank_batch / p->micro_batch),
            .micro = (uint64_t)p->micro_batch,
        },
        ret));
    return 0;
}

/* ---- what is looked for ---- */

struct item_look {
    uint64_t hash, bytes; /* of the picture; bytes 0: it has none */
    uint32_t
        words; /* of its longest caption: tokens of the first text where there is a tokenizer */
    bool is_void, has_caption, has_lines; /* a caption of several */
};

struct look {
    const char *path;  /* data.path */
    lg_config *config; /* NULL: a data set alone */
    lg_plan plan;      /* with a config */
    struct lg_buckets buckets;
    struct lg_order_spec cut;              /* ranks, micros, micro */
    lg_tokenizer *tokenizer[LG_TEXTS_MAX]; /* of the plan's texts; none: words are counted */
    lg_source *source;
    uint64_t count;
    struct item_look *item;    /* (count) */
    struct lg_item_size *size; /* (count) */
    lg_item stored;
    lg_picture picture;
    int32_t ids[TOKENS_MAX];
    bool by_line;                                   /* each line of a caption is one */
    uint64_t voids, texts, texts_cut[LG_TEXTS_MAX]; /* by text of the model */
};

static uint32_t words_of(const char *text)
{
    uint32_t n = 0;
    for (bool inside = false; *text; text++) {
        const bool is_space = isspace((unsigned char)*text);
        n += !is_space && !inside;
        inside = !is_space;
    }
    return n;
}

/* A text that a sample may get. */
static int look_at_text(struct look *l, struct item_look *i, const char *text)
{
    l->texts++;
    if (!l->plan.n_texts) i->words = LG_MAX(i->words, words_of(text));
    for (int t = 0; t < l->plan.n_texts; t++) {
        int n = 0;
        LG_TRY(lg_tokenizer_encode(l->tokenizer[t], text, TOKENS_MAX, l->ids, &n));
        if (t == 0) i->words = LG_MAX(i->words, (uint32_t)n);
        l->texts_cut[t] += n > l->plan.text[t].length;
    }
    return 0;
}

static int look_at_line(struct look *l, struct item_look *i, const char *line, size_t bytes)
{
    char *text = strndup(line, bytes);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a caption of %zu bytes", bytes);
    int rc = look_at_text(l, i, text);
    free(text);
    return rc;
}

static int look_at_captions(struct look *l, struct item_look *i)
{
    i->has_caption = l->stored.n_captions > 0;
    for (int k = 0; k < l->stored.n_captions; k++) {
        const char *rest = l->stored.caption[k], *line;
        size_t bytes;
        int lines = 0;
        if (!l->by_line) LG_TRY(look_at_text(l, i, rest));
        for (; (line = lg_caption_line(&rest, &bytes)); lines++)
            if (l->by_line) LG_TRY(look_at_line(l, i, line, bytes));
        i->has_lines |= lines > 1;
    }
    return 0;
}

/* A picture that has a size and yet does not decode. */
static int look_at_picture(struct look *l, struct item_look *i, struct lg_item_size *size)
{
    struct lg_picture_size whole;
    size_t need;
    i->bytes = l->stored.picture_bytes;
    i->hash = lg_hash(l->stored.picture, l->stored.picture_bytes);
    LG_TRY(lg_picture_size(l->stored.picture, l->stored.picture_bytes, &need, &whole));
    *size = (struct lg_item_size){(uint16_t)whole.width, (uint16_t)whole.height, 1, 0};
    LG_TRY(lg_picture_decode(l->stored.picture, l->stored.picture_bytes, 1, &l->picture));
    return 0;
}

static int look_at_clip(struct look *l, struct item_look *i, struct lg_item_size *size)
{
    struct lg_clip_hash hash = {0};
    const int frames = l->config ? l->plan.frames : 1;
    int rc = lg_look_at_clip(l->stored.clip, frames, size, &hash);
    i->hash = hash.hash;
    i->bytes = hash.bytes;
    LG_TRY(rc);
    return 0;
}

static int look_at(struct look *l, uint64_t n)
{
    struct item_look *i = &l->item[n];
    LG_TRY(lg_source_read(l->source, n, &l->stored));
    if (l->stored.clip)
        LG_TRY(look_at_clip(l, i, &l->size[n]));
    else if (l->stored.picture)
        LG_TRY(look_at_picture(l, i, &l->size[n]));
    LG_TRY(look_at_captions(l, i));
    return 0;
}

/* Names those that do not decode as it comes to them. */
static int look_at_all(struct look *l)
{
    for (uint64_t n = 0; n < l->count; n++) {
        int rc = look_at(l, n);
        if (rc == LG_ERR_VOID) {
            if (l->voids == 0) printf("cannot be read, and would be trained with weight 0:\n");
            const char *key = l->stored.key, *why = lg_err_message();
            const bool named = !strncmp(why, key, strlen(key));
            if (l->voids < NAMED_MAX)
                lg_print(stdout, "    %s%s%s\n", named ? "" : key, named ? "" : ": ", why);
            l->item[n].is_void = true;
            l->voids++;
            lg_err_clear();
            continue;
        }
        LG_TRY(rc);
    }
    if (l->voids > NAMED_MAX) printf("    and %" PRIu64 " more\n", l->voids - NAMED_MAX);
    return 0;
}

/* ---- figures ---- */

static void print_sizes(const struct look *l, uint32_t *v)
{
    static const char *const name[] = {"width", "height", "shorter side"};
    for (int k = 0; k < 3; k++) {
        uint64_t n = 0;
        for (uint64_t i = 0; i < l->count; i++) {
            const uint32_t w = l->size[i].width, h = l->size[i].height;
            if (w && h) v[n++] = k == 0 ? w : k == 1 ? h : LG_MIN(w, h);
        }
        const struct lg_spread s = lg_spread_of(v, n);
        if (n) printf("%s: %u to %u pixels, median %u\n", name[k], s.least, s.most, s.median);
    }
}

static void print_captions(const struct look *l, uint32_t *v)
{
    uint64_t n = 0, without = 0, lines = 0;
    for (uint64_t i = 0; i < l->count; i++) {
        if (l->item[i].is_void) continue;
        without += !l->item[i].has_caption;
        lines += l->item[i].has_lines;
        if (l->item[i].has_caption) v[n++] = l->item[i].words;
    }
    const struct lg_spread s = lg_spread_of(v, n);
    printf("captions: %" PRIu64 " samples have one, %" PRIu64 " have none%s", n, without,
           without && l->plan.n_texts ? ", and would be trained with weight 0" : "");
    if (n)
        printf("; %u to %u %s, median %u", s.least, s.most, l->plan.n_texts ? "tokens" : "words",
               s.median);
    if (n && l->plan.n_texts > 1) printf(" (of %s)", lg_role_name(l->plan.text[0].role));
    for (int t = 0; t < l->plan.n_texts; t++)
        printf("; %" PRIu64 " of %" PRIu64 " %s are cut at %s.length = %d", l->texts_cut[t],
               l->texts, l->by_line ? "lines" : "captions", lg_role_name(l->plan.text[t].role),
               l->plan.text[t].length);
    putchar('\n');
    if (lines && !l->by_line)
        printf("    %" PRIu64 " samples have captions of several lines, which are one text: "
               "data.caption = \"first\" or \"random\" takes one of them\n",
               lines);
}

static void print_clips(const struct look *l, uint32_t *v)
{
    struct lg_look_clips c = {.size = l->size, .count = l->count, .v = v};
    if (l->config) c.rate = lg_loader_rate(l->config);
    if (l->config && l->plan.frames > 1) c.frames = l->plan.frames;
    for (int k = 0; k < l->plan.buckets.n; k++) {
        const int frames = l->plan.buckets.of[k].frames;
        c.has_pictures |= frames == 1;
        if (frames > 1) c.frames = LG_MIN(c.frames, frames);
    }
    lg_look_print_clips(&c);
}

static const struct item_look *sorted_items; /* of by_hash */

static int by_hash(const void *a, const void *b)
{
    const uint64_t i = *(const uint64_t *)a, k = *(const uint64_t *)b;
    const struct item_look *x = &sorted_items[i], *y = &sorted_items[k];
    if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return (i > k) - (i < k);
}

static int print_copies(struct look *l)
{
    uint64_t copies = 0, first = 0, *order = calloc(l->count, sizeof *order);
    if (!order) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %" PRIu64 " items", l->count);
    for (uint64_t i = 0; i < l->count; i++) order[i] = i;
    sorted_items = l->item;
    qsort(order, l->count, sizeof *order, by_hash);
    for (uint64_t i = 1; i < l->count; i++) {
        const struct item_look *x = &l->item[order[first]], *y = &l->item[order[i]];
        if (x->hash != y->hash || x->bytes != y->bytes) {
            first = i;
            continue;
        }
        if (!y->bytes) continue;
        char a[LG_PATH_BYTES], b[LG_PATH_BYTES];
        lg_source_key(l->source, order[first], a);
        lg_source_key(l->source, order[i], b);
        if (copies == 0) printf("copies, byte for byte, of another picture:\n");
        if (copies++ < NAMED_MAX) lg_print(stdout, "    %s is %s\n", b, a);
    }
    if (copies > NAMED_MAX) printf("    and %" PRIu64 " more\n", copies - NAMED_MAX);
    if (!copies) printf("copies: no picture is there twice\n");
    free(order);
    return 0;
}

static int print_buckets(struct look *l)
{
    lg_order *o;
    struct lg_order_spec spec = l->cut;
    if (!l->buckets.n) {
        printf("buckets: none, every picture becomes one of data.size, %d x %d\n",
               l->plan.image_height, l->plan.image_width);
        return 0;
    }
    for (uint64_t i = 0; !l->config && i < l->count; i++) l->size[i].frames = 1; /* shapes alone */
    spec.buckets = &l->buckets;
    spec.size = l->size;
    if (l->config) spec.rate = lg_loader_rate(l->config);
    LG_TRY(lg_source_order(l->source, &spec, &o));
    if (l->config)
        printf("buckets (height x width), %" PRIu64 " ranks, micro-batches of %" PRIu64 ":\n",
               spec.ranks, spec.micro);
    else
        printf("buckets (height x width) of \"ratio\" at data.size = %d, one sample at a time:\n",
               LOOK_SIZE);
    uint64_t places = 0, moved = 0, stands = 0;
    for (int k = 0; k < l->buckets.n; k++) {
        const struct lg_bucket *b = &l->buckets.of[k];
        const struct lg_order_bucket of = lg_order_bucket(o, k);
        places += of.groups * spec.ranks * (uint64_t)b->rows;
        stands += of.items;
        if (!of.items) moved += of.nearest;
        if (!of.nearest) continue;
        printf("    ");
        if (b->frames > 1) printf("%d x ", b->frames);
        printf("%4d x %-4d nearest to %" PRIu64, b->height, b->width, of.nearest);
        if (!of.items)
            printf(": too few, they go to a neighbour\n");
        else
            printf(", holds %" PRIu64 ": %" PRIu64 " times %" PRIu64 " in an epoch\n", of.items,
                   of.groups, spec.ranks * (uint64_t)b->rows);
    }
    printf("    an epoch has %" PRIu64 " places for %" PRIu64
           " items (%.1f %% stay empty); %" PRIu64 " items are cropped to a neighbour's shape\n",
           places, stands, 100.0 * (double)(places - stands) / (double)places, moved);
    lg_order_free(&o);
    return 0;
}

/* What comes from each source, in a whole run where there is a config of one. */
static void print_sources(const struct look *l)
{
    const int n = lg_source_parts(l->source);
    if (!l->config || !l->config->data_source.n) return;
    const double samples = (double)l->config->trainer_max_steps * (double)l->plan.batch;
    for (int i = 0; i < n; i++) {
        const struct lg_source_part part = lg_source_part(l->source, i);
        lg_print(stdout,
                 "    data.source[%d] %s: %" PRIu64 " samples, %.4g %% of a run's, each %.4g times "
                 "in its %" PRId64 " steps\n",
                 i, l->config->data_source.v[i].path, part.count, 100 * part.share,
                 samples * part.share / (double)part.count, l->config->trainer_max_steps);
    }
}

static void print_left(uint64_t n, const char *what, const char *first)
{
    if (n == 0) return;
    lg_print(stdout, "left out, %s: %" PRIu64 " (%s%s)\n", what, n, first,
             n > 1 ? " and others" : "");
}
static void print_left_out(const struct lg_left_out *out)
{
    print_left(out->other, "files of other kinds", out->first_other);
    print_left(out->same, "pictures that have the name of another but for the ending",
               out->first_same);
    print_left(out->alone, "texts or labels without a picture", out->first_alone);
}

/* ---- all ---- */

static bool is_config(const char *target)
{
    const size_t n = strlen(target), m = strlen(".toml");
    return n > m && !strcmp(target + n - m, ".toml");
}

static int open_config(struct look *l, const char *file, const char *const *set, int n_set)
{
    LG_TRY(lg_config_load(file, set, n_set, &l->config));
    LG_TRY(lg_config_check(l->config));
    LG_TRY(lg_plan_make(l->config, NULL, &l->plan));
    const lg_plan *p = &l->plan;
    l->path = lg_config_data(l->config);
    l->buckets = p->buckets;
    l->cut = (struct lg_order_spec){
        .ranks = (uint64_t)(p->hosts * p->instances[LG_ROLE_trainer] / p->sequence),
        .micros = (uint64_t)(p->rank_batch / p->micro_batch),
        .micro = (uint64_t)p->micro_batch};
    l->by_line = lg_caption_choice_of(l->config->data_caption) != LG_CAPTION_LISTED;
    for (int t = 0; t < p->n_texts; t++)
        LG_TRY(lg_tokenizer_open(lg_text_keys(l->config, p->text[t].role).model, &l->tokenizer[t]));
    return 0;
}

static int open_alone(struct look *l, const char *path)
{
    char *word = (char *)"ratio";
    const struct lg_strlist ratio = {&word, 1};
    l->path = path;
    l->cut = (struct lg_order_spec){.ranks = 1, .micros = 1, .micro = 1};
    return lg_buckets_make(&ratio,
                           &(struct lg_buckets_spec){.height = LOOK_SIZE,
                                                     .width = LOOK_SIZE,
                                                     .frames = 1,
                                                     .unit = 16,
                                                     .factor_time = 1,
                                                     .micro_batch = 1},
                           &l->buckets);
}

static int look(struct look *l)
{
    /* What a model needs of a sample is said, not demanded. */
    const struct lg_source_options options = {.allow_truncated = true, .clips = !l->config};
    LG_TRY(l->config ? lg_source_open_data(l->config, &options, &l->source)
                     : lg_source_open(l->path, &options, &l->source));
    l->count = lg_source_count(l->source);
    l->item = calloc(l->count, sizeof *l->item);
    l->size = calloc(l->count, sizeof *l->size);
    uint32_t *v = calloc(l->count, sizeof *v);
    int rc = l->item && l->size && v
                 ? 0
                 : LG_FAIL(LG_ERR_NOSPACE, "no memory for %" PRIu64 " items", l->count);
    if (rc == 0) {
        lg_print(stdout, "%s: %" PRIu64 " samples of %s\n", l->path, l->count,
                 lg_source_has_latents(l->source) ? "latents"
                 : lg_source_has_clips(l->source) ? "clips and pictures"
                                                  : "pictures");
        print_left_out(lg_source_left_out(l->source));
        print_sources(l);
        rc = look_at_all(l);
    }
    if (rc == 0) {
        if (!l->voids) printf("all of them can be read\n");
        print_sizes(l, v);
        print_clips(l, v);
        print_captions(l, v);
        rc = print_copies(l);
    }
    if (rc == 0 && !lg_source_has_latents(l->source)) rc = print_buckets(l);
    free(v);
    return rc;
}

int lg_loader_look(const char *target, const char *const *set, int n_set)
{
    struct look *l = calloc(1, sizeof *l);
    LG_ASSERT(l);
    int rc = is_config(target) ? open_config(l, target, set, n_set)
             : n_set           ? LG_FAIL(LG_ERR_USAGE, "--set goes with a pipeline.toml")
                               : open_alone(l, target);
    if (rc == 0) rc = look(l);
    fflush(stdout);
    lg_source_close(&l->source);
    for (int t = 0; t < LG_TEXTS_MAX; t++) lg_tokenizer_close(&l->tokenizer[t]);
    lg_item_free(&l->stored);
    lg_picture_free(&l->picture);
    lg_config_free(&l->config);
    free(l->item);
    free(l->size);
    free(l);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}
