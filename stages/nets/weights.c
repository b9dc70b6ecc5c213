/* A set of tensors over one or more safetensors files.
 *
 * Design: every file is opened once; the index only says which files belong to the model, and is
 * checked against them, so that a wrong shard is found at opening and not at the first use. Lookups
 * ask each file in turn (a model has few shards).
 *
 * Invariant: files[0 .. n) are open as long as the set is. */
#include "stages/nets/weights.h"
#include "base/fs.h"
#include "base/json.h"
#include <stdlib.h>
#include <string.h>

enum { SHARDS_MAX = 512, INDEX_BYTES_MAX = 64 << 20, INDEX_TOKENS_MAX = 4 << 20 };

struct lg_weights {
    char path[LG_PATH_BYTES];
    lg_st_file *files[SHARDS_MAX];
    char *names[SHARDS_MAX]; /* of the shards, as the index has them */
    int n;
};

/* The shard's position, opening it when it is new. */
static int shard_of(lg_weights *w, const char *dir, const char *name)
{
    for (int i = 0; i < w->n; i++)
        if (!strcmp(w->names[i], name)) return i;
    if (strchr(name, '/') || !*name)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: shard name \"%s\" is not a plain file name", w->path,
                       name);
    if (w->n == SHARDS_MAX)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: more than %d shards", w->path, SHARDS_MAX);
    char path[LG_PATH_BYTES];
    LG_TRY(lg_path(path, "%s%s", dir, name));
    LG_TRY(lg_st_open(path, &w->files[w->n]));
    w->names[w->n] = strdup(name);
    LG_ASSERT(w->names[w->n]);
    return w->n++;
}

/* The text of a key or string, which has to be shorter than a path. */
static int take_text(const lg_weights *w, const lg_json *j, char ret[LG_PATH_BYTES])
{
    if (j->bytes >= LG_PATH_BYTES)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: a name of %zu bytes", w->path, j->bytes);
    lg_json_text(j, ret);
    return 0;
}

/* "tensor": "shard", ...; the reader is behind the opening brace. */
static int read_map(lg_weights *w, lg_json *j)
{
    char dir[LG_PATH_BYTES], tensor[LG_PATH_BYTES], shard[LG_PATH_BYTES];
    const char *slash = strrchr(w->path, '/');
    LG_TRY(lg_path(dir, "%.*s", slash ? (int)(slash - w->path + 1) : 0, w->path));
    for (;;) {
        LG_TRY(lg_json_next(j));
        if (j->kind == LG_JSON_OBJECT_END) return 0;
        LG_TRY(take_text(w, j, tensor));
        LG_TRY(lg_json_next(j));
        if (j->kind != LG_JSON_STRING)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" does not name a file", w->path, tensor);
        LG_TRY(take_text(w, j, shard));
        int i = shard_of(w, dir, shard);
        LG_TRY(i);
        if (!lg_st_find(w->files[i], tensor))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor %s is not in %s", w->path, tensor, shard);
    }
}

/* Opens shards on the way, so it needs no list of tensors. */
static int read_index(lg_weights *w, lg_json *j)
{
    bool map = false;
    LG_TRY(lg_json_expect(j, LG_JSON_OBJECT, "this is not JSON of an index"));
    for (;;) {
        LG_TRY(lg_json_next(j));
        if (j->kind == LG_JSON_OBJECT_END) break;
        if (!lg_json_is(j, "weight_map")) {
            LG_TRY(lg_json_skip(j));
            continue;
        }
        if (map) return lg_json_fail(j, "\"weight_map\" appears twice");
        map = true;
        LG_TRY(lg_json_expect(j, LG_JSON_OBJECT, "\"weight_map\" is no object"));
        LG_TRY(read_map(w, j));
    }
    LG_TRY(lg_json_next(j)); /* the end */
    if (w->n == 0) return LG_FAIL(LG_ERR_CORRUPT, "%s: no \"weight_map\"", w->path);
    return 0;
}

static int open_index(lg_weights *w)
{
    char *text;
    size_t bytes;
    LG_TRY(lg_read_file(w->path, INDEX_BYTES_MAX, &text, &bytes));
    lg_json j;
    lg_json_open(
        &j, &(struct lg_json_source){
                .label = w->path, .data = text, .bytes = bytes, .tokens_max = INDEX_TOKENS_MAX});
    int rc = read_index(w, &j);
    free(text);
    LG_TRY(rc);
    return 0;
}

static bool ends_with(const char *path, const char *tail)
{
    size_t n = strlen(path), t = strlen(tail);
    return n > t && !strcmp(path + n - t, tail);
}

static bool is_index(const char *path)
{
    return ends_with(path, ".index.json") || ends_with(path, ".index.fp16.json");
}

/* The first of the names that weights go by (weights.h). */
static int find(lg_weights *w, const char *path)
{
    static const char tail[] = ".safetensors";
    LG_TRY(lg_path(w->path, "%s", path));
    if (is_index(path) || lg_path_exists(path)) return 0;
    LG_TRY(lg_path(w->path, "%s.index.json", path));
    if (lg_path_exists(w->path)) return 0;
    if (ends_with(path, tail)) {
        const int stem = (int)(strlen(path) - (sizeof tail - 1));
        LG_TRY(lg_path(w->path, "%.*s.fp16%s", stem, path, tail));
        if (lg_path_exists(w->path)) return 0;
    }
    LG_TRY(lg_path(w->path, "%s.index.fp16.json", path));
    if (lg_path_exists(w->path)) return 0;
    return LG_FAIL(LG_ERR_NOTFOUND,
                   "%s: no such file, and no .index.json or variant .fp16 beside it; check the "
                   "model's folder",
                   path);
}

int lg_weights_open(const char *path, lg_weights **ret)
{
    lg_weights *w = calloc(1, sizeof *w);
    LG_ASSERT(w);
    int rc;
    LG_TRY_GOTO(rc, find(w, path), fail);
    if (is_index(w->path)) {
        LG_TRY_GOTO(rc, open_index(w), fail);
    } else {
        LG_TRY_GOTO(rc, lg_st_open(w->path, &w->files[0]), fail);
        w->n = 1;
    }
    *ret = w;
    return 0;
fail:
    lg_weights_close(&w);
    return rc;
}

void lg_weights_close(lg_weights **w)
{
    if (!*w) return;
    for (int i = 0; i < (*w)->n; i++) {
        lg_st_close(&(*w)->files[i]);
        free((*w)->names[i]);
    }
    free(*w);
    *w = NULL;
}

const char *lg_weights_path(const lg_weights *w)
{
    return w->path;
}

int lg_weights_count(const lg_weights *w)
{
    int n = 0;
    for (int i = 0; i < w->n; i++) n += lg_st_count(w->files[i]);
    return n;
}

const struct lg_st_entry *lg_weights_at(const lg_weights *w, int i)
{
    for (int f = 0; f < w->n; f++) {
        int n = lg_st_count(w->files[f]);
        if (i < n) return lg_st_at(w->files[f], i);
        i -= n;
    }
    return NULL;
}

const struct lg_st_entry *lg_weights_find(const lg_weights *w, const char *name)
{
    for (int f = 0; f < w->n; f++) {
        const struct lg_st_entry *e = lg_st_find(w->files[f], name);
        if (e) return e;
    }
    return NULL;
}
