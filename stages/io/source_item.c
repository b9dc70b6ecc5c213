/* The contents of items; see source.h. */
#include "base/json.h"
#include "stages/io/csv.h"
#include "stages/io/source_lines.h"
#include "stages/io/source_private.h"
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SOURCE_BYTES = 16 /* of a key that begins with a source's number */ };

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

/* What captions were looked for in, for messages. */
static const char *json_name(bool is_line)
{
    return is_line ? "line of metadata.jsonl" : ".json";
}

static int with_json_error(const lg_item *item, bool is_line, int rc)
{
    if (rc == LG_ERR_VOID)
        return LG_FAIL(LG_ERR_VOID, "%s: its %s is malformed: %s", item->key, json_name(is_line),
                       lg_err_message());
    return rc;
}

/* Keys that hold captions, the later going before; the first in metadata.jsonl alone. */
static const char *const CAPTION_KEYS[] = {"text", "caption", "captions"};

/* Reads the whole document; *ret stands before the value that holds the captions, or at the end. */
static int find_captions(lg_json *j, bool is_line, lg_json *ret)
{
    bool seen[LG_ARRAY_LEN(CAPTION_KEYS)] = {0};
    size_t best = 0; /* key's number + 1 */
    lg_json start = *j;
    LG_TRY(lg_json_next(j));
    bool object = j->kind == LG_JSON_OBJECT;
    while (j->kind != LG_JSON_END) {
        bool own = object && j->kind == LG_JSON_KEY && j->depth == 1;
        for (size_t k = is_line ? 0 : 1; own && k < LG_ARRAY_LEN(CAPTION_KEYS); k++) {
            if (!lg_json_is(j, CAPTION_KEYS[k])) continue;
            if (seen[k]) return lg_json_fail(j, "its captions stand there twice");
            seen[k] = true;
            if (k + 1 > best) start = *j, best = k + 1;
        }
        LG_TRY(lg_json_next(j));
    }
    *ret = object && !best ? *j : start;
    return 0;
}

/* Captions of a .json or of a line: see source.h. `room` holds at least `bytes` + 1. */
static int parse_json(lg_item *item, bool is_line, const char *json, size_t bytes, char *room)
{
    lg_json j, value;
    lg_json_open(
        &j,
        &(struct lg_json_source){
            .label = "it", .data = json, .bytes = bytes, .code = LG_ERR_VOID, .loose_text = true});
    LG_TRY(with_json_error(item, is_line, find_captions(&j, is_line, &value)));
    LG_TRY(lg_json_next(&value));
    if (value.kind == LG_JSON_STRING) {
        take_caption(item, &room, &value);
    } else if (value.kind == LG_JSON_ARRAY) {
        for (;;) {
            LG_TRY(lg_json_next(&value));
            if (value.kind == LG_JSON_ARRAY_END) break;
            if (value.kind != LG_JSON_STRING)
                return LG_FAIL(LG_ERR_VOID, "%s: a caption in its %s is no string", item->key,
                               json_name(is_line));
            take_caption(item, &room, &value);
        }
    } else if (value.kind != LG_JSON_NULL && value.kind != LG_JSON_END) {
        return LG_FAIL(LG_ERR_VOID, "%s: the caption in its %s is no string", item->key,
                       json_name(is_line));
    }
    return 0;
}

/* The caption in a field of metadata.csv; an empty one is none. */
static int parse_field(lg_item *item, char *field, size_t bytes)
{
    lg_csv c;
    lg_csv_open(&c, &(struct lg_csv_source){
                        .label = "it", .data = field, .bytes = bytes, .code = LG_ERR_VOID});
    if (bytes == 0) return 0;
    if (lg_csv_next(&c) < 0 || c.at + c.bytes != bytes)
        return LG_FAIL(LG_ERR_VOID, "%s: its caption in " LG_LINES_CSV_NAME " is no field of CSV",
                       item->key);
    item->caption[item->n_captions++] = trimmed(field, lg_csv_text(&c, field));
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
        if (m->kind == LG_MEMBER_JSON || m->kind == LG_MEMBER_LINE)
            json_bytes = (size_t)m->bytes + 1;
    }
    p->captions_at = at;
    *ret_bytes = at + json_bytes;
    return 0;
}

int lg_item_reserve(lg_item *item, size_t bytes)
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
    LG_TRY(lg_item_reserve(item, extra));
    print_key(s, at, item->data, item->capacity);
    item->key = item->data;
    item->key_hash = lg_hash(item->key, strlen(item->key));
    item->picture = item->latent = NULL;
    item->picture_bytes = item->latent_bytes = 0;
    item->clip = NULL;
    lg_item_clip_close(&item->film);
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
    const bool is_line = p->member[LG_MEMBER_LINE]; /* then there is no .json */
    const int captions = is_line ? LG_MEMBER_LINE : LG_MEMBER_JSON;
    if ((m = p->member[captions]))
        LG_TRY(parse_json(item, is_line, item->data + p->at[captions], m->bytes,
                          item->data + p->captions_at));
    if ((m = p->member[LG_MEMBER_FIELD]))
        LG_TRY(parse_field(item, item->data + p->at[LG_MEMBER_FIELD], m->bytes));
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
        return LG_FAIL(LG_ERR_VOID,
                       "%s: has no caption (.txt, .json, or a line of " LG_LINES_NAME
                       " or " LG_LINES_CSV_NAME ")",
                       item->key);
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
            LG_TRY(lg_source_read_member(s, e->shard, p.member[k], p.member[k]->bytes,
                                         ret->data + p.at[k]));
    if (p.member[LG_MEMBER_CLIP]) {
        lg_item_clip_open(s, e->shard, p.member[LG_MEMBER_CLIP], &ret->film);
        ret->clip = &ret->film.input;
    }
    LG_TRY(parse(s, ret, &p));
    find_animation(s, ret);
    return 0;
}

void lg_item_free(lg_item *item)
{
    lg_item_clip_close(&item->film);
    free(item->data);
    *item = (lg_item){0};
}
