/* A set of tensors over one or more safetensors files.
 *
 * Design: every file is opened once; the index only says which files belong to the model, and is
 * checked against them, so that a wrong shard is found at opening and not at the first use. Lookups
 * ask each file in turn (a model has few shards).
 *
 * Invariant: files[0 .. n) are open as long as the set is. */
#include "stages/nets/weights.h"
#include "base/fs.h"
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

enum { SHARDS_MAX = 512, INDEX_BYTES_MAX = 64 << 20 };

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

static int read_map(lg_weights *w, const cJSON *root)
{
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(root, "weight_map");
    if (!cJSON_IsObject(map) || !map->child)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: no \"weight_map\"", w->path);
    char dir[LG_PATH_BYTES];
    const char *slash = strrchr(w->path, '/');
    LG_TRY(lg_path(dir, "%.*s", slash ? (int)(slash - w->path + 1) : 0, w->path));
    for (const cJSON *e = map->child; e; e = e->next) {
        if (!cJSON_IsString(e))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" does not name a file", w->path, e->string);
        int i = shard_of(w, dir, e->valuestring);
        LG_TRY(i);
        if (!lg_st_find(w->files[i], e->string))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor %s is not in %s", w->path, e->string,
                           e->valuestring);
    }
    return 0;
}

static int open_index(lg_weights *w)
{
    char *text;
    size_t bytes;
    LG_TRY(lg_read_file(w->path, INDEX_BYTES_MAX, &text, &bytes));
    cJSON *root = cJSON_ParseWithLength(text, bytes);
    free(text);
    int rc = root ? read_map(w, root) : LG_FAIL(LG_ERR_CORRUPT, "%s: this is not JSON", w->path);
    cJSON_Delete(root);
    return rc;
}

static bool is_index(const char *path)
{
    static const char tail[] = ".index.json";
    size_t n = strlen(path);
    return n > sizeof tail - 1 && !strcmp(path + n - (sizeof tail - 1), tail);
}

int lg_weights_open(const char *path, lg_weights **ret)
{
    lg_weights *w = calloc(1, sizeof *w);
    LG_ASSERT(w);
    int rc;
    LG_TRY_GOTO(rc, lg_path(w->path, "%s", path), fail);
    if (!is_index(path) && !lg_path_exists(path)) {
        LG_TRY_GOTO(rc, lg_path(w->path, "%s.index.json", path), fail);
        if (!lg_path_exists(w->path)) {
            rc = LG_FAIL(LG_ERR_NOTFOUND,
                         "%s: no such file, and no .index.json beside it; check the model's folder",
                         path);
            goto fail;
        }
    }
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
