/* manifest.json; see manifest.h. Paths in a manifest are data from disk: absolute ones and ".." are
 * refused before they are opened. */
#include "config/manifest.h"
#include "base/json_tree.h"
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MANIFEST_BYTES_MAX = 1 << 20, MANIFEST_TOKENS_MAX = 1 << 14 };

static int path_is_safe(const char *p)
{
    return *p && *p != '/' && !strstr(p, "..");
}

int lg_manifest_add(lg_manifest *m, const char *dir, const char *path)
{
    LG_ASSERT(m->n_files < LG_MANIFEST_FILES_MAX && path_is_safe(path));
    struct lg_manifest_file *f = &m->file[m->n_files];
    char full[LG_PATH_BYTES];
    LG_TRY(lg_path(full, "%s/%s", dir, path));
    LG_TRY(lg_hash_file(full, &f->hash, &f->bytes));
    snprintf(f->path, sizeof f->path, "%s", path);
    m->n_files++;
    return 0;
}

/* cJSON writes numbers of so many digits exactly. */
#define EXACT_MAX UINT64_C(999999999999999)

/* A seed may be any 64-bit number: beyond what is exact it is a text. */
static void add_seed(cJSON *to, uint64_t seed)
{
    char digits[24];
    snprintf(digits, sizeof digits, "%" PRIu64, seed);
    if (seed <= EXACT_MAX)
        cJSON_AddNumberToObject(to, "seed", (double)seed);
    else
        cJSON_AddStringToObject(to, "seed", digits);
}

static void add_hex(cJSON *to, const char *key, uint64_t v)
{
    char hex[17];
    snprintf(hex, sizeof hex, "%016" PRIx64, v);
    cJSON_AddStringToObject(to, key, hex);
}

int lg_manifest_save(const lg_manifest *m, const char *dir)
{
    cJSON *j = cJSON_CreateObject();
    cJSON_AddNumberToObject(j, "format", 1);
    cJSON_AddStringToObject(j, "name", m->name);
    cJSON_AddNumberToObject(j, "step", (double)m->step);
    cJSON_AddNumberToObject(j, "next_n", (double)m->next_n);
    add_seed(j, m->seed);
    add_hex(j, "plan_hash", m->plan_hash);
    if (m->lineage) add_hex(j, "lineage", m->lineage);
    cJSON_AddStringToObject(j, "isa", m->isa);
    cJSON_AddNumberToObject(j, "ranks", m->ranks);
    cJSON_AddNumberToObject(j, "threads", m->threads);
    cJSON_AddStringToObject(j, "fingerprint", m->fingerprint);
    cJSON_AddNumberToObject(j, "optimizer_steps", (double)m->optimizer_steps);
    cJSON_AddNumberToObject(j, "skipped", (double)m->skipped);
    cJSON_AddNumberToObject(j, "loss_scale", (double)m->loss_scale);
    cJSON_AddNumberToObject(j, "loss_scale_steps", (double)m->loss_scale_steps);
    if (m->lr_steps) cJSON_AddNumberToObject(j, "lr_steps", (double)m->lr_steps);
    cJSON *data = m->n_data ? cJSON_AddArrayToObject(j, "data") : NULL;
    for (int i = 0; i < m->n_data; i++) {
        cJSON *d = cJSON_CreateObject();
        cJSON_AddNumberToObject(d, "first", (double)m->data[i].first);
        cJSON_AddNumberToObject(d, "epoch", (double)m->data[i].epoch);
        cJSON_AddNumberToObject(d, "items", (double)m->data[i].items);
        add_hex(d, "hash", m->data[i].hash);
        cJSON_AddItemToArray(data, d);
    }
    cJSON *files = cJSON_AddArrayToObject(j, "files");
    for (int i = 0; i < m->n_files; i++) {
        cJSON *f = cJSON_CreateObject();
        cJSON_AddStringToObject(f, "path", m->file[i].path);
        cJSON_AddNumberToObject(f, "bytes", (double)m->file[i].bytes);
        add_hex(f, "xxh3", m->file[i].hash);
        cJSON_AddItemToArray(files, f);
    }
    char *text = cJSON_Print(j), path[LG_PATH_BYTES];
    cJSON_Delete(j);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the manifest of %s", dir);
    int rc = lg_path(path, "%s/manifest.json", dir);
    if (rc == 0) rc = lg_publish_file(path, text, strlen(text));
    free(text);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

static int get_number(const cJSON *j, const char *path, const char *key, uint64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    if (!cJSON_IsNumber(v) || v->valuedouble < 0 || v->valuedouble > 9e15)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" is missing or not a count", path, key);
    *ret = (uint64_t)v->valuedouble;
    return 0;
}

/* What decides is the plan's hash. Earlier builds wrote a rounded number for a large one. */
static int get_seed(const cJSON *j, const char *path, uint64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, "seed");
    const char *text = cJSON_IsString(v) ? v->valuestring : "";
    if (cJSON_IsNumber(v) && v->valuedouble >= 0 && v->valuedouble < 0x1p64) {
        *ret = (uint64_t)v->valuedouble;
        return 0;
    }
    errno = 0;
    *ret = strtoull(text, NULL, 10);
    if (!*text || text[strspn(text, "0123456789")] || errno)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"seed\" is missing or not a whole number", path);
    return 0;
}

/* Ranks, threads: nowhere near what an int holds. */
static int get_small(const cJSON *j, const char *path, const char *key, int *ret)
{
    enum { SMALL_MAX = 1 << 16 };
    uint64_t v = 0;
    LG_TRY(get_number(j, path, key, &v));
    if (v > SMALL_MAX)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" is %" PRIu64 ", must be at most %d", path, key,
                       v, SMALL_MAX);
    *ret = (int)v;
    return 0;
}

static int get_hex(const cJSON *j, const char *path, const char *key, uint64_t *ret)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    char *end = NULL;
    if (cJSON_IsString(v)) *ret = strtoull(v->valuestring, &end, 16);
    if (!end || *end || end - v->valuestring != 16)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" is missing or not 16 hex digits", path, key);
    return 0;
}

static int get_text(const cJSON *j, const char *path, const char *key, char *ret, size_t bytes)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(j, key);
    if (!cJSON_IsString(v) || strlen(v->valuestring) >= bytes)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" is missing or too long", path, key);
    strcpy(ret, v->valuestring);
    return 0;
}

static int get_files(const cJSON *j, const char *path, lg_manifest *m)
{
    const cJSON *files = cJSON_GetObjectItemCaseSensitive(j, "files"), *f;
    if (!cJSON_IsArray(files) || cJSON_GetArraySize(files) > LG_MANIFEST_FILES_MAX)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"files\" is missing or too long", path);
    if (cJSON_GetArraySize(files) == 0)
        return LG_FAIL(LG_ERR_CORRUPT, "%s lists no files: no checkpoint is empty", path);
    cJSON_ArrayForEach(f, files)
    {
        struct lg_manifest_file *row = &m->file[m->n_files];
        LG_TRY(get_text(f, path, "path", row->path, sizeof row->path));
        LG_TRY(get_number(f, path, "bytes", &row->bytes));
        LG_TRY(get_hex(f, path, "xxh3", &row->hash));
        if (!path_is_safe(row->path))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: file name \"%s\" leaves the checkpoint", path,
                           row->path);
        m->n_files++;
    }
    return 0;
}

static int get_data(const cJSON *j, const char *path, lg_manifest *m)
{
    const cJSON *data = cJSON_GetObjectItemCaseSensitive(j, "data"), *d;
    if (!data) return 0;
    if (!cJSON_IsArray(data) || cJSON_GetArraySize(data) > LG_DATA_PARTS_MAX)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"data\" is no list, or too long", path);
    cJSON_ArrayForEach(d, data)
    {
        struct lg_data_part *p = &m->data[m->n_data];
        LG_TRY(get_number(d, path, "first", &p->first));
        LG_TRY(get_number(d, path, "epoch", &p->epoch));
        LG_TRY(get_number(d, path, "items", &p->items));
        LG_TRY(get_hex(d, path, "hash", &p->hash));
        if (!p->items || !p->hash || p->first > m->next_n || (m->n_data && p->first <= p[-1].first))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: \"data\" is no list of parts in order", path);
        m->n_data++;
    }
    return 0;
}

static int parse(const cJSON *j, const char *path, lg_manifest *m)
{
    uint64_t format = 0;
    LG_TRY(get_number(j, path, "format", &format));
    if (format != 1)
        return LG_FAIL(LG_ERR_MISMATCH, "%s has format %" PRIu64 ", this build reads 1", path,
                       format);
    LG_TRY(get_text(j, path, "name", m->name, sizeof m->name));
    LG_TRY(get_number(j, path, "step", &m->step));
    LG_TRY(get_number(j, path, "next_n", &m->next_n));
    LG_TRY(get_seed(j, path, &m->seed));
    LG_TRY(get_hex(j, path, "plan_hash", &m->plan_hash));
    if (cJSON_HasObjectItem(j, "lineage")) LG_TRY(get_hex(j, path, "lineage", &m->lineage));
    LG_TRY(get_text(j, path, "isa", m->isa, sizeof m->isa));
    LG_TRY(get_small(j, path, "ranks", &m->ranks));
    LG_TRY(get_small(j, path, "threads", &m->threads));
    LG_TRY(get_text(j, path, "fingerprint", m->fingerprint, sizeof m->fingerprint));
    LG_TRY(get_number(j, path, "optimizer_steps", &m->optimizer_steps));
    LG_TRY(get_number(j, path, "skipped", &m->skipped));
    if (cJSON_GetObjectItemCaseSensitive(j, "loss_scale")) {
        LG_TRY(get_number(j, path, "loss_scale", &m->loss_scale));
        LG_TRY(get_number(j, path, "loss_scale_steps", &m->loss_scale_steps));
    }
    if (cJSON_GetObjectItemCaseSensitive(j, "lr_steps"))
        LG_TRY(get_number(j, path, "lr_steps", &m->lr_steps));
    LG_TRY(get_data(j, path, m));
    LG_TRY(get_files(j, path, m));
    return 0;
}

static int check_sizes(const lg_manifest *m, const char *dir)
{
    for (int i = 0; i < m->n_files; i++) {
        char full[LG_PATH_BYTES];
        struct stat st;
        LG_TRY(lg_path(full, "%s/%s", dir, m->file[i].path));
        if (stat(full, &st) < 0)
            return errno == ENOENT
                       ? LG_FAIL(LG_ERR_CORRUPT, "%s is missing, though the manifest lists it",
                                 full)
                       : LG_FAIL(lg_err_from_errno(errno), "%s: %s", full, strerror(errno));
        if ((uint64_t)st.st_size != m->file[i].bytes)
            return LG_FAIL(LG_ERR_CORRUPT, "%s has %lld bytes, the manifest says %" PRIu64, full,
                           (long long)st.st_size, m->file[i].bytes);
    }
    return 0;
}

static int load(const char *dir, bool with_sizes, lg_manifest *ret)
{
    char path[LG_PATH_BYTES], *text = NULL;
    size_t bytes;
    LG_TRY(lg_path(path, "%s/manifest.json", dir));
    LG_TRY(lg_read_file(path, MANIFEST_BYTES_MAX, &text, &bytes));
    cJSON *j = NULL;
    int rc = lg_json_tree(path, text, bytes, MANIFEST_TOKENS_MAX, &j);
    free(text);
    LG_TRY(rc);
    lg_manifest *m = calloc(1, sizeof *m);
    rc = m ? parse(j, path, m) : LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", path);
    if (rc == 0 && with_sizes) rc = check_sizes(m, dir);
    if (rc == 0) *ret = *m;
    cJSON_Delete(j);
    free(m);
    return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : 0;
}

int lg_manifest_read(const char *dir, lg_manifest *ret)
{
    return load(dir, false, ret);
}

int lg_manifest_load(const char *dir, lg_manifest *ret)
{
    return load(dir, true, ret);
}

int lg_manifest_verify(const lg_manifest *m, const char *dir)
{
    LG_TRY(check_sizes(m, dir));
    for (int i = 0; i < m->n_files; i++) {
        char full[LG_PATH_BYTES];
        uint64_t hash;
        LG_TRY(lg_path(full, "%s/%s", dir, m->file[i].path));
        LG_TRY(lg_hash_file(full, &hash, NULL));
        if (hash != m->file[i].hash)
            return LG_FAIL(LG_ERR_CORRUPT,
                           "%s has hash %016" PRIx64 ", the manifest says %016" PRIx64
                           ": the file was changed or damaged",
                           full, hash, m->file[i].hash);
    }
    return 0;
}

bool lg_manifest_same_run(const lg_manifest *a, const lg_manifest *b)
{
    if (a->lineage && b->lineage) return a->lineage == b->lineage;
    return a->plan_hash == b->plan_hash && !strcmp(a->name, b->name);
}

bool lg_manifest_same_data(const lg_manifest *older, const lg_manifest *newer)
{
    if (!older->n_data || !newer->n_data) return true;
    for (int i = 0; i < older->n_data; i++)
        if (i >= newer->n_data || !lg_data_same(&older->data[i], &newer->data[i])) return false;
    return older->n_data == newer->n_data || older->next_n <= newer->data[older->n_data].first;
}

bool lg_manifest_exists(const char *dir)
{
    char path[LG_PATH_BYTES];
    return lg_path(path, "%s/manifest.json", dir) == 0 && lg_path_exists(path);
}

bool lg_checkpoint_step(const char *entry, const char *name, uint64_t *ret_step)
{
    enum { DIGITS_MAX = 15 };
    size_t len = strlen(name);
    if (strncmp(entry, name, len) || strncmp(entry + len, "_step", 5)) return false;
    const char *digits = entry + len + 5;
    size_t n = strspn(digits, "0123456789");
    if (!n || digits[n] || n > DIGITS_MAX || (digits[0] == '0' && n > 1)) return false;
    *ret_step = strtoull(digits, NULL, 10);
    return true;
}

static bool is_leftover(const char *entry, const char *name, uint64_t *ret_step)
{
    char text[NAME_MAX + 1];
    if (strncmp(entry, ".tmp-", 5) && strncmp(entry, ".old-", 5)) return false;
    snprintf(text, sizeof text, "%s", entry + 5);
    char *step = strstr(text, "_step"), *writer;
    for (char *next; step && (next = strstr(step + 1, "_step"));) step = next;
    if (step && (writer = strchr(step, '.'))) *writer = 0;
    return lg_checkpoint_step(text, name, ret_step);
}

void lg_manifest_remove_leftovers(const char *checkpoints_dir, const char *name, uint64_t upto)
{
    char path[LG_PATH_BYTES];
    uint64_t step;
    DIR *d = opendir(checkpoints_dir);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        if (!is_leftover(e->d_name, name, &step) || step > upto) continue;
        if (lg_path(path, "%s/%s", checkpoints_dir, e->d_name) < 0 || lg_remove_tree(path) < 0)
            lg_err_clear();
    }
    closedir(d);
}

int lg_manifest_newest(const char *checkpoints_dir, const char *name, char ret_dir[LG_PATH_BYTES],
                       lg_manifest *ret)
{
    /* At most a handful of directories: look for the largest below the last failure, again and
     * again. */
    for (int64_t below = INT64_MAX;;) {
        DIR *d = opendir(checkpoints_dir);
        int64_t best = -1;
        if (d) {
            for (struct dirent *e; (e = readdir(d));) {
                uint64_t n;
                if (lg_checkpoint_step(e->d_name, name, &n) && (int64_t)n > best &&
                    (int64_t)n < below)
                    best = (int64_t)n;
            }
            closedir(d);
        }
        if (!d && errno != ENOENT)
            return LG_FAIL(lg_err_from_errno(errno), "cannot read %s: %s", checkpoints_dir,
                           strerror(errno));
        if (best < 0)
            return LG_FAIL(LG_ERR_NOTFOUND, "no complete checkpoint %s_step<N> in %s", name,
                           checkpoints_dir);
        char dir[LG_PATH_BYTES];
        LG_TRY(lg_path(dir, "%s/%s_step%lld", checkpoints_dir, name, (long long)best));
        int rc = lg_manifest_load(dir, ret);
        if (rc == 0 && ret->step != (uint64_t)best)
            return LG_FAIL(LG_ERR_MISMATCH,
                           "%s is a checkpoint of step %" PRIu64
                           ": give it back its name, or move it away",
                           dir, ret->step);
        if (rc == 0) {
            memcpy(ret_dir, dir, LG_PATH_BYTES);
            return 0;
        }
        /* What cannot be read is not incomplete: going back further would throw work away. */
        if (rc != LG_ERR_NOTFOUND && rc != LG_ERR_CORRUPT)
            return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        lg_err_clear();
        below = best;
    }
}

int lg_checkpoint_weights_dir(const char *dir, const char *which, char ret[LG_PATH_BYTES])
{
    static const char *const files[] = {"config.json", "adapter_config.json"};
    char path[LG_PATH_BYTES];
    const char *const candidates[] = {".", which, "model", "transformer", "adapter"};
    for (size_t i = 0; i < LG_ARRAY_LEN(candidates); i++) {
        for (size_t f = 0; f < LG_ARRAY_LEN(files); f++) {
            LG_TRY(lg_path(path, "%s/%s/%s", dir, candidates[i], files[f]));
            if (!lg_path_exists(path)) continue;
            return i ? lg_path(ret, "%s/%s", dir, candidates[i]) : lg_path(ret, "%s", dir);
        }
    }
    return LG_FAIL(
        LG_ERR_NOTFOUND,
        "%s is neither a diffusers folder (config.json) nor a checkpoint (%s/config.json)", dir,
        which);
}
