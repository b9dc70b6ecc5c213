/* Reading items of a data set; see source.h. The index is source_index.c, the choices that make a
 * sample of an item are source_sample.c.
 *
 * Files are read with pread on descriptors that stay open, the least recently used one being closed
 * when LG_SOURCE_FDS_MAX are. Every failing read is LG_ERR_IO, also when a file has become shorter
 * or is gone: the data set was whole when it was indexed, so this is a matter of the machine, not
 * of the sample. Only content that can never be used makes a sample void. */
#include "stages/io/source.h"
#include "base/beneath.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "base/json.h"
#include "stages/io/source_index.h"
#include "stages/io/source_parts.h"
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    FIRST_BYTES = 4096, /* of a picture, which mostly show its size */
    SOURCE_BYTES = 16   /* of a key that begins with a source's number */
};

struct open_shard {
    int fd; /* -1: free */
    size_t shard;
    uint64_t used; /* the read that used it last */
};

struct lg_source {
    struct lg_index index;
    struct lg_mixture mixture;
    uint64_t stands; /* items, each as often as it is repeated */
    struct lg_source_options options;
    struct open_shard open[LG_SOURCE_FDS_MAX];
    uint64_t reads;
    lg_item head; /* the beginning of a picture */
};

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

/* ---- bytes ---- */

static int shard_fd(lg_source *s, size_t shard, int *ret_fd)
{
    struct open_shard *oldest = &s->open[0];
    s->reads++;
    for (int i = 0; i < LG_SOURCE_FDS_MAX; i++) {
        struct open_shard *o = &s->open[i];
        if (o->fd >= 0 && o->shard == shard) {
            o->used = s->reads;
            *ret_fd = o->fd;
            return 0;
        }
        if (o->fd < 0 || (oldest->fd >= 0 && o->used < oldest->used)) oldest = o;
    }
    const char *path = s->index.shard[shard].path;
    int fd;
    uint64_t bytes;
    if (lg_open_file(path, &fd, &bytes) < 0) return LG_ERR_IO;
    if (bytes != s->index.shard_bytes[shard]) {
        close(fd);
        return LG_FAIL(LG_ERR_IO, "%s has changed since the run began; put the old file back",
                       path);
    }
    if (oldest->fd >= 0) close(oldest->fd);
    *oldest = (struct open_shard){.fd = fd, .shard = shard, .used = s->reads};
    *ret_fd = fd;
    return 0;
}

static void forget_fd(lg_source *s, int fd)
{
    for (int i = 0; i < LG_SOURCE_FDS_MAX; i++) {
        if (s->open[i].fd != fd) continue;
        close(fd);
        s->open[i].fd = -1;
    }
}

static int read_exactly(int fd, const char *path, uint64_t at, char *dst, size_t bytes)
{
    for (size_t got = 0; got < bytes;) {
        size_t want = LG_MIN(bytes - got, (size_t)LG_PIECE_BYTES);
        ssize_t n = pread(fd, dst + got, want, (off_t)(at + got));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return LG_FAIL(LG_ERR_IO, "reading %s at byte %llu: %s", path,
                           (unsigned long long)(at + got),
                           n ? strerror(errno) : "the file became shorter");
        got += (size_t)n;
        lg_heartbeat();
    }
    return 0;
}

static int read_from_tar(lg_source *s, size_t shard, uint64_t at, void *dst, size_t bytes)
{
    int fd;
    LG_TRY(shard_fd(s, shard, &fd));
    int rc = read_exactly(fd, s->index.shard[shard].path, at, dst, bytes);
    if (rc < 0) {
        forget_fd(s, fd); /* the next try opens it anew: a handle may be stale */
        return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    }
    return 0;
}

/* A file in a folder. */
static int open_member(const lg_source *s, size_t shard, const struct lg_index_member *m,
                       char ret_path[LG_PATH_BYTES], int *ret_fd)
{
    const struct lg_place *place = &s->index.shard[shard];
    LG_TRY(lg_path(ret_path, "%s/%s", place->path, s->index.names + m->at));
    int fd = lg_open_beneath(place->path, s->index.names + m->at);
    if (fd < 0)
        return LG_FAIL(LG_ERR_IO, "cannot open %s: %s", ret_path,
                       errno == EXDEV ? "it leads out of the folder now" : strerror(errno));
    struct stat st;
    if (fstat(fd, &st) < 0 || LG_MIN((uint64_t)st.st_size, UINT32_MAX) != m->bytes) {
        close(fd);
        return LG_FAIL(LG_ERR_IO, "%s has changed since the run began; put the old file back",
                       ret_path);
    }
    *ret_fd = fd;
    return 0;
}

/* Its first bytes. */
static int read_member(lg_source *s, size_t shard, const struct lg_index_member *m, size_t bytes,
                       char *dst)
{
    char path[LG_PATH_BYTES];
    int fd;
    if (!s->index.shard[shard].is_folder) {
        LG_TRY(read_from_tar(s, shard, m->at, dst, bytes));
        return 0;
    }
    LG_TRY(open_member(s, shard, m, path, &fd));
    int rc = read_exactly(fd, path, 0, dst, bytes);
    close(fd);
    LG_TRY(rc);
    return 0;
}

/* Of a clip, whose file stays open. */
static int read_clip(void *arg, uint64_t at, void *dst, size_t bytes)
{
    struct lg_item_clip *c = arg;
    lg_source *s = c->source;
    char path[LG_PATH_BYTES];
    int fd;
    if (!s->index.shard[c->shard].is_folder) {
        LG_TRY(read_from_tar(s, c->shard, c->member->at + at, dst, bytes));
        return 0;
    }
    if (!c->fd) {
        LG_TRY(open_member(s, c->shard, c->member, path, &fd));
        c->fd = fd + 1;
    }
    LG_TRY(read_exactly(c->fd - 1, s->index.names + c->member->at, at, dst, bytes));
    return 0;
}

static void close_clip(struct lg_item_clip *c)
{
    if (c->fd) close(c->fd - 1);
    *c = (struct lg_item_clip){0};
}

static void open_clip(lg_source *s, size_t shard, const struct lg_index_member *m,
                      struct lg_item_clip *ret)
{
    *ret = (struct lg_item_clip){.source = s, .shard = shard, .member = m};
    ret->input = (struct lg_clip_input){.read = read_clip, .arg = ret, .bytes = m->bytes};
}

/* ---- text ---- */

/* NUL-terminates text and trims white space (and a byte order mark) at both ends. */
static const char *trimmed(char *text, size_t bytes)
{
    text[bytes] = 0;
    bytes = strlen(text);
    if (bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) text += 3, bytes -= 3;
    while (bytes && isspace((unsigned char)text[bytes - 1])) text[--bytes] = 0;
    while (isspace((unsigned char)*text)) text++;
    return text;
}

/* Copies a caption to *at, behind the ones before. A JSON string is never shorter in its source, so
 * the room of the source's size + 1 always suffices. */
static void take_caption(lg_item *item, char **at, const lg_json *j)
{
    if (item->n_captions == LG_SOURCE_CAPTIONS_MAX) return;
    size_t len = lg_json_text(j, *at);
    item->caption[item->n_captions++] = trimmed(*at, len);
    *at += len + 1;
}

static int with_json_error(const lg_item *item, int rc)
{
    if (rc == LG_ERR_VOID)
        return LG_FAIL(LG_ERR_VOID, "%s: its .json is malformed: %s", item->key, lg_err_message());
    return rc;
}

/* Reads the whole document; *ret stands before the value that holds the captions, or at the end. */
static int find_captions(lg_json *j, lg_json *ret)
{
    bool caption = false, captions = false;
    lg_json start = *j;
    LG_TRY(lg_json_next(j));
    bool object = j->kind == LG_JSON_OBJECT;
    while (j->kind != LG_JSON_END) {
        bool own = object && j->kind == LG_JSON_KEY && j->depth == 1;
        bool one = own && lg_json_is(j, "caption"), many = own && lg_json_is(j, "captions");
        if ((one && caption) || (many && captions))
            return lg_json_fail(j, "its captions stand there twice");
        caption |= one;
        captions |= many;
        if (many || (one && !captions)) start = *j;
        LG_TRY(lg_json_next(j));
    }
    *ret = object && !caption && !captions ? *j : start;
    return 0;
}

/* Captions of a .json: see source.h. `room` holds at least `bytes` + 1. */
static int parse_json(lg_item *item, const char *json, size_t bytes, char *room)
{
    lg_json j, value;
    lg_json_open(
        &j,
        &(struct lg_json_source){
            .label = "it", .data = json, .bytes = bytes, .code = LG_ERR_VOID, .loose_text = true});
    LG_TRY(with_json_error(item, find_captions(&j, &value)));
    LG_TRY(lg_json_next(&value));
    if (value.kind == LG_JSON_STRING) {
        take_caption(item, &room, &value);
    } else if (value.kind == LG_JSON_ARRAY) {
        for (;;) {
            LG_TRY(lg_json_next(&value));
            if (value.kind == LG_JSON_ARRAY_END) break;
            if (value.kind != LG_JSON_STRING)
                return LG_FAIL(LG_ERR_VOID, "%s: a caption in its .json is no string", item->key);
            take_caption(item, &room, &value);
        }
    } else if (value.kind != LG_JSON_NULL && value.kind != LG_JSON_END) {
        return LG_FAIL(LG_ERR_VOID, "%s: the caption in its .json is no string", item->key);
    }
    return 0;
}

static int parse_label(lg_item *item, char *text, size_t bytes)
{
    const char *t = trimmed(text, bytes);
    char *end;
    errno = 0;
    long long v = strtoll(t, &end, 10);
    if (end == t || *end || errno || v < 0)
        return LG_FAIL(LG_ERR_VOID, "%s: its .cls is no class number: %.40s", item->key, t);
    item->label = v;
    return 0;
}

/* ---- items ---- */

/* Where the members go in the item's memory. */
struct spans {
    const struct lg_index_member *member[LG_MEMBER_KINDS];
    size_t at[LG_MEMBER_KINDS];
    size_t captions_at;
};

static size_t round_up(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

static int plan_spans(const lg_source *s, uint64_t item, size_t key_bytes, struct spans *p,
                      size_t *ret_bytes)
{
    const struct lg_index_entry *e = &s->index.entry[item];
    size_t at = round_up(key_bytes), json_bytes = 0;
    for (size_t i = e[0].first_member; i < e[1].first_member; i++) {
        const struct lg_index_member *m = &s->index.member[i];
        bool text = m->kind != LG_MEMBER_PICTURE && m->kind != LG_MEMBER_LATENT;
        p->member[m->kind] = m;
        if (m->kind == LG_MEMBER_CLIP) continue; /* read as it is needed */
        if (m->bytes > (text ? LG_SOURCE_TEXT_BYTES_MAX : LG_SOURCE_MEMBER_BYTES_MAX)) return -1;
        p->at[m->kind] = at;
        at += round_up((size_t)m->bytes + 1);
        if (m->kind == LG_MEMBER_JSON) json_bytes = (size_t)m->bytes + 1;
    }
    p->captions_at = at;
    *ret_bytes = at + json_bytes;
    return 0;
}

static int reserve(lg_item *item, size_t bytes)
{
    if (bytes <= item->capacity) return 0;
    char *data = malloc(bytes);
    if (!data) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the %zu bytes of a sample", bytes);
    free(item->data);
    item->data = data;
    item->capacity = bytes;
    return 0;
}

/* False: it does not fit. */
static bool print_key(const lg_source *s, uint64_t at, char *ret, size_t bytes)
{
    const struct lg_index_entry *e = &s->index.entry[at];
    const char *shard = lg_index_shard_name(&s->index, e->shard);
    char source[SOURCE_BYTES] = "";
    if (s->index.n_sources > 1)
        snprintf(source, sizeof source, "%d:", lg_index_source_of(&s->index, at));
    int n = snprintf(ret, bytes, "%s%s%s%s", source, shard, shard[0] ? "/" : "",
                     s->index.names + e->key_at);
    return n >= 0 && (size_t)n < bytes;
}

void lg_source_key(const lg_source *s, uint64_t item, char ret[LG_PATH_BYTES])
{
    LG_ASSERT(item < s->index.count && print_key(s, item, ret, LG_PATH_BYTES));
}

/* Empties the item and sets its key. */
static int begin(const lg_source *s, uint64_t at, lg_item *item, size_t extra)
{
    LG_TRY(reserve(item, extra));
    print_key(s, at, item->data, item->capacity);
    item->key = item->data;
    item->key_hash = lg_hash(item->key, strlen(item->key));
    item->picture = item->latent = NULL;
    item->picture_bytes = item->latent_bytes = 0;
    item->clip = NULL;
    close_clip(&item->film);
    item->n_captions = 0;
    item->label = -1;
    return 0;
}

static int parse(const lg_source *s, lg_item *item, const struct spans *p)
{
    const struct lg_index_member *m;
    if ((m = p->member[LG_MEMBER_PICTURE])) {
        item->picture = (const uint8_t *)item->data + p->at[LG_MEMBER_PICTURE];
        item->picture_bytes = m->bytes;
    }
    if ((m = p->member[LG_MEMBER_LATENT])) {
        item->latent = (const uint8_t *)item->data + p->at[LG_MEMBER_LATENT];
        item->latent_bytes = m->bytes;
    }
    if ((m = p->member[LG_MEMBER_JSON]))
        LG_TRY(parse_json(item, item->data + p->at[LG_MEMBER_JSON], m->bytes,
                          item->data + p->captions_at));
    if ((m = p->member[LG_MEMBER_TXT]) && item->n_captions == 0)
        item->caption[item->n_captions++] = trimmed(item->data + p->at[LG_MEMBER_TXT], m->bytes);
    if ((m = p->member[LG_MEMBER_CLS]))
        LG_TRY(parse_label(item, item->data + p->at[LG_MEMBER_CLS], m->bytes));
    if (lg_source_has_latents(s) ? !item->latent : !item->picture && !item->clip)
        return LG_FAIL(LG_ERR_VOID, "%s: has no %s", item->key,
                       lg_source_has_latents(s) ? ".latent.safetensors, unlike others"
                       : s->options.clips       ? "picture or clip"
                                                : "picture (.png, .jpg, .jpeg or .webp)");
    if (s->options.need_caption && item->n_captions == 0)
        return LG_FAIL(LG_ERR_VOID, "%s: has no caption (.txt or .json)", item->key);
    if (s->options.need_label && item->label < 0)
        return LG_FAIL(LG_ERR_VOID, "%s: has no class label (.cls)", item->key);
    return 0;
}

/* Where clips are looked for, an animated WebP is one. */
static void find_animation(const lg_source *s, lg_item *item)
{
    if (!s->options.clips || item->clip || !item->picture) return;
    if (!lg_clip_is(item->picture, item->picture_bytes)) return;
    item->film.memory =
        (struct lg_clip_memory){.data = item->picture, .bytes = item->picture_bytes};
    item->film.input = lg_clip_memory(&item->film.memory);
    item->clip = &item->film.input;
}

int lg_source_read(lg_source *s, uint64_t item, lg_item *ret)
{
    LG_ASSERT(item < s->index.count);
    const struct lg_index_entry *e = &s->index.entry[item];
    size_t key_bytes = SOURCE_BYTES + strlen(lg_index_shard_name(&s->index, e->shard)) + 1 +
                       strlen(s->index.names + e->key_at) + 1;
    struct spans p = {0};
    size_t bytes = 0;
    bool too_large = plan_spans(s, item, key_bytes, &p, &bytes) < 0;
    LG_TRY(begin(s, item, ret, too_large ? key_bytes : bytes));
    if (too_large)
        return LG_FAIL(LG_ERR_VOID, "%s: larger than a picture of %u or a text of %u bytes",
                       ret->key, LG_SOURCE_MEMBER_BYTES_MAX, LG_SOURCE_TEXT_BYTES_MAX);
    for (int k = 0; k < LG_MEMBER_KINDS; k++)
        if (p.member[k] && k != LG_MEMBER_CLIP)
            LG_TRY(read_member(s, e->shard, p.member[k], p.member[k]->bytes, ret->data + p.at[k]));
    if (p.member[LG_MEMBER_CLIP]) {
        open_clip(s, e->shard, p.member[LG_MEMBER_CLIP], &ret->film);
        ret->clip = &ret->film.input;
    }
    LG_TRY(parse(s, ret, &p));
    find_animation(s, ret);
    return 0;
}

/* More of the picture is read until it shows its size: twice as much each time, so that a file of a million small segments
 * costs no more than reading it twice. */
static int find_size(lg_source *s, size_t shard, const struct lg_index_member *m,
                     struct lg_picture_size *ret)
{
    size_t need = FIRST_BYTES, have = 0;
    *ret = (struct lg_picture_size){0};
    while (!ret->width) {
        if (have == m->bytes) return LG_FAIL(LG_ERR_VOID, "picture is cut off before its size");
        have = LG_MIN(LG_MAX(need, 2 * have), (size_t)m->bytes);
        LG_TRY(reserve(&s->head, have));
        LG_TRY(read_member(s, shard, m, have, s->head.data));
        LG_TRY(lg_picture_size(s->head.data, have, &need, ret));
    }
    return 0;
}

static int look_at_clip(lg_source *s, size_t shard, const struct lg_index_member *m,
                        struct lg_item_size *ret)
{
    struct lg_item_clip film;
    struct lg_clip_info info;
    open_clip(s, shard, m, &film);
    int rc = lg_clip_look(&film.input, &info);
    close_clip(&film);
    LG_TRY(rc);
    *ret = (struct lg_item_size){.width = (uint16_t)info.width,
                                 .height = (uint16_t)info.height,
                                 .frames = info.frames,
                                 .duration_ms = info.duration_ms};
    return 0;
}

/* A member of an item, or NULL. */
static const struct lg_index_member *find_member(const lg_source *s, uint64_t item,
                                                 enum lg_member_kind kind)
{
    const struct lg_index_entry *e = &s->index.entry[item];
    for (size_t i = e->first_member; i < e[1].first_member; i++)
        if (s->index.member[i].kind == kind) return &s->index.member[i];
    return NULL;
}

int lg_source_size(lg_source *s, uint64_t item, struct lg_item_size *ret)
{
    LG_ASSERT(item < s->index.count);
    const size_t shard = s->index.entry[item].shard;
    const struct lg_index_member *m = find_member(s, item, LG_MEMBER_CLIP);
    struct lg_picture_size size;
    if (m) {
        LG_TRY(look_at_clip(s, shard, m, ret));
        return 0;
    }
    m = find_member(s, item, LG_MEMBER_PICTURE);
    if (!m) return LG_FAIL(LG_ERR_VOID, "has no picture");
    if (m->bytes > LG_SOURCE_MEMBER_BYTES_MAX)
        return LG_FAIL(LG_ERR_VOID, "a picture of more than %u bytes", LG_SOURCE_MEMBER_BYTES_MAX);
    LG_TRY(find_size(s, shard, m, &size));
    if (s->options.clips && lg_clip_is(s->head.data, LG_MIN((size_t)FIRST_BYTES, m->bytes))) {
        LG_TRY(look_at_clip(s, shard, m, ret));
        return 0;
    }
    *ret = (struct lg_item_size){(uint16_t)size.width, (uint16_t)size.height, 1, 0};
    return 0;
}

void lg_item_free(lg_item *item)
{
    close_clip(&item->film);
    free(item->data);
    *item = (lg_item){0};
}
