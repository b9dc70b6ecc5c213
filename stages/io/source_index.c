/* Building the index of a data set; see source_index.h and source.h.
 *
 * Tars: members arrive in archive order and those with the same key in a row are one item. Folders:
 * the tree is walked, the usable files are sorted by path without extension, and equal keys are one
 * item; there a caption without a picture (a README.txt) is no item, while in a shard it is one, a
 * void one, since shards are made by programs and a missing picture is a fault to be seen. */
#include "stages/io/source_index.h"
#include "base/beneath.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include "stages/io/source_lines.h"
#include "stages/io/tar.h"
#include <fcntl.h>
#include <fts.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

static const struct {
    const char *extension;
    enum lg_member_kind kind;
} KINDS[] = {
    {".png", LG_MEMBER_PICTURE},  {".jpg", LG_MEMBER_PICTURE},
    {".jpeg", LG_MEMBER_PICTURE}, {".webp", LG_MEMBER_PICTURE},
    {".txt", LG_MEMBER_TXT},      {".json", LG_MEMBER_JSON},
    {".cls", LG_MEMBER_CLS},      {".latent.safetensors", LG_MEMBER_LATENT},
    {".mp4", LG_MEMBER_CLIP},     {".m4v", LG_MEMBER_CLIP},
    {".mov", LG_MEMBER_CLIP},     {".webm", LG_MEMBER_CLIP},
    {".mkv", LG_MEMBER_CLIP},     {".gif", LG_MEMBER_CLIP},
};

/* ---- growing ---- */

static int grow(void **data, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity) return 0;
    size_t want = LG_MAX(need, *capacity * 2);
    void *p = realloc(*data, LG_MAX(want, (size_t)256) * size);
    if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the index of the data set");
    *data = p;
    *capacity = LG_MAX(want, (size_t)256);
    return 0;
}

static int add_name(struct lg_index *x, const char *s, size_t len, uint64_t *ret_at)
{
    LG_TRY(grow((void **)&x->names, &x->names_capacity, x->names_bytes + len + 1, 1));
    *ret_at = x->names_bytes;
    memcpy(x->names + x->names_bytes, s, len);
    x->names[x->names_bytes + len] = 0;
    x->names_bytes += len + 1;
    return 0;
}

static int add_entry(struct lg_index *x, size_t shard, const char *key, size_t key_len)
{
    struct lg_index_entry e = {.shard = (uint32_t)shard, .first_member = (uint32_t)x->n_members};
    LG_TRY(grow((void **)&x->entry, &x->entry_capacity, x->count + 2, sizeof *x->entry));
    LG_TRY(add_name(x, key, key_len, &e.key_at));
    x->entry[x->count++] = e;
    return 0;
}

/* To the last entry; a second member of one kind is ignored. */
static int add_member(struct lg_index *x, enum lg_member_kind kind, uint64_t at, uint64_t bytes)
{
    for (size_t i = x->entry[x->count - 1].first_member; i < x->n_members; i++)
        if (x->member[i].kind == kind) return 0;
    if (x->n_members == UINT32_MAX)
        return LG_FAIL(LG_ERR_CONFIG, "the data set has more than 2^32 files");
    LG_TRY(grow((void **)&x->member, &x->member_capacity, x->n_members + 1, sizeof *x->member));
    x->member[x->n_members++] = (struct lg_index_member){
        .at = at, .bytes = (uint32_t)LG_MIN(bytes, UINT32_MAX), .kind = (uint8_t)kind};
    return 0;
}

/* ---- tar shards ---- */

struct shard_scan {
    struct lg_index *x;
    bool clips;
    size_t shard, first_entry;
    char key[LG_TAR_NAME_MAX];
    size_t key_len;
    bool has_entry; /* the current key has one */
};

/* Cuts a member's name into key and extension. False for names that are none of ours. */
static bool tar_key(const char **name, size_t *ret_key_len, const char **ret_extension)
{
    while ((*name)[0] == '.' && (*name)[1] == '/') *name += 2;
    const char *slash = strrchr(*name, '/'), *base = slash ? slash + 1 : *name;
    const char *dot = strchr(base, '.');
    if (!dot || dot == base || strncmp(base, "__", 2) == 0) return false;
    *ret_key_len = (size_t)(dot - *name);
    *ret_extension = dot;
    return true;
}

static int on_tar_member(void *ctx, const struct lg_tar_member *m)
{
    struct shard_scan *s = ctx;
    const char *name = m->name, *extension;
    size_t key_len;
    if (!tar_key(&name, &key_len, &extension)) return 0;
    if (key_len != s->key_len || memcmp(name, s->key, key_len) != 0) {
        memcpy(s->key, name, key_len);
        s->key_len = key_len;
        s->has_entry = false;
    }
    for (size_t k = 0; k < LG_ARRAY_LEN(KINDS); k++) {
        if (strcasecmp(extension, KINDS[k].extension) != 0) continue;
        if (KINDS[k].kind == LG_MEMBER_CLIP && !s->clips) continue;
        if (!s->has_entry) LG_TRY(add_entry(s->x, s->shard, s->key, s->key_len));
        s->has_entry = true;
        LG_TRY(add_member(s->x, KINDS[k].kind, m->offset, m->size));
    }
    return 0;
}

/* A shard cut short, and that is allowed: drops the sample that the cut may have touched. */
static void keep_complete(struct shard_scan *s, const struct lg_tar_cut *cut)
{
    const char *name = cut->name, *extension;
    size_t key_len;
    bool other = cut->name[0] && tar_key(&name, &key_len, &extension) &&
                 (key_len != s->key_len || memcmp(name, s->key, key_len) != 0);
    if (s->has_entry && !other) {
        s->x->count--;
        s->x->n_members = s->x->entry[s->x->count].first_member;
        s->x->names_bytes = s->x->entry[s->x->count].key_at;
    }
    lg_log(LG_WARN, "%s; using the %zu complete samples before that", lg_err_message(),
           s->x->count - s->first_entry);
    lg_err_clear();
}

static int index_tar(struct lg_index *x, size_t shard, const struct lg_source_options *o)
{
    const char *path = x->shard[shard].path;
    int fd;
    uint64_t bytes;
    int rc = lg_open_file(path, &fd, &bytes);
    if (rc < 0) return LG_FAIL(LG_ERR_IO, "cannot use the shard: %s", lg_err_message());
    struct lg_tar_cut *cut = calloc(1, sizeof *cut);
    struct shard_scan *s = calloc(1, sizeof *s);
    if (!cut || !s) {
        rc = LG_FAIL(LG_ERR_NOSPACE, "no memory to index %s", path);
        goto out;
    }
    *s = (struct shard_scan){.x = x, .clips = o->clips, .shard = shard, .first_entry = x->count};
    cut->offset = UINT64_MAX;
    x->shard_bytes[shard] = bytes;
    rc = lg_tar_scan(fd, path, on_tar_member, s, cut);
    if (rc == LG_ERR_CORRUPT && cut->offset != UINT64_MAX && o->allow_truncated) {
        keep_complete(s, cut);
        rc = 0;
    }
out:
    free(cut);
    free(s);
    close(fd);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

/* ---- plain folders ---- */

struct file {
    char *path; /* relative to the folder */
    uint64_t bytes;
    uint32_t key_len;
    uint8_t kind, preference; /* the earlier in KINDS, the better */
};

struct files {
    bool clips;
    struct file *at;
    size_t count, capacity;
    struct lg_index *index;
    const char *folder;
    struct lg_lines lines;
};

/* Of all folders together. */
static void leave_out(uint64_t *n, char first[LG_NAME_SHOWN_BYTES], const char *name)
{
    if (*n == 0 || strncmp(name, first, LG_NAME_SHOWN_BYTES - 1) < 0)
        snprintf(first, LG_NAME_SHOWN_BYTES, "%s", name);
    ++*n;
}

/* A metadata.jsonl or metadata.csv. */
static int add_lines(struct files *f, const char *relative, uint64_t bytes)
{
    struct lg_index *x = f->index;
    if (x->n_line_files == LG_LINES_FILES_MAX)
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.path: more than %d files " LG_LINES_NAME " and " LG_LINES_CSV_NAME,
                       LG_LINES_FILES_MAX);
    struct lg_index_line_file of = {.bytes = bytes},
                              *all = realloc(x->line_file, (x->n_line_files + 1) * sizeof *all);
    if (!all) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the index of the data set");
    x->line_file = all;
    LG_TRY(add_name(x, relative, strlen(relative), &of.name_at));
    all[x->n_line_files] = of;
    return lg_lines_add(&f->lines, f->folder, relative, (uint16_t)x->n_line_files++);
}

static int by_key(const void *a, const void *b)
{
    const struct file *x = a, *y = b;
    int d = memcmp(x->path, y->path, LG_MIN(x->key_len, y->key_len));
    if (d) return d;
    if (x->key_len != y->key_len) return x->key_len < y->key_len ? -1 : 1;
    return x->preference - y->preference;
}

static int add_file(struct files *f, const char *path, uint64_t bytes)
{
    size_t len = strlen(path), best = SIZE_MAX, cut = 0;
    for (size_t k = 0; k < LG_ARRAY_LEN(KINDS); k++) {
        size_t n = strlen(KINDS[k].extension);
        if (KINDS[k].kind == LG_MEMBER_CLIP && !f->clips) continue;
        if (len > n && path[len - n - 1] != '/' &&
            strcasecmp(path + len - n, KINDS[k].extension) == 0) {
            best = k;
            cut = n;
        }
    }
    if (lg_lines_is(path)) return add_lines(f, path, bytes);
    struct lg_left_out *out = &f->index->left_out;
    if (best == SIZE_MAX) {
        leave_out(&out->other, out->first_other, path);
        return 0;
    }
    LG_TRY(grow((void **)&f->at, &f->capacity, f->count + 1, sizeof *f->at));
    char *copy = strdup(path);
    if (!copy) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the index of the data set");
    f->at[f->count++] = (struct file){.path = copy,
                                      .bytes = bytes,
                                      .key_len = (uint32_t)(len - cut),
                                      .kind = (uint8_t)KINDS[best].kind,
                                      .preference = (uint8_t)best};
    return 0;
}

/* A link: followed next, or left out because it leads nowhere or out of the folder. */
static int on_link(FTS *fts, FTSENT *e, const char *root, struct lg_links_out *out)
{
    int why;
    if (lg_is_beneath(root, e->fts_path, &why)) {
        fts_set(fts, e, FTS_FOLLOW);
        return 0;
    }
    if (why) return LG_FAIL(LG_ERR_IO, "cannot follow %s: %s", e->fts_path, strerror(why));
    lg_links_out_add(out, e->fts_path);
    return 0;
}

static int walk(const char *root, struct files *f, struct lg_links_out *out)
{
    char *roots[] = {(char *)root, NULL};
    FTS *fts = fts_open(roots, FTS_PHYSICAL | FTS_COMFOLLOW | FTS_NOCHDIR, NULL);
    if (!fts) return LG_FAIL(LG_ERR_IO, "cannot walk the folder %s: %s", root, strerror(errno));
    int rc = 0;
    size_t skip = strlen(root);
    for (FTSENT *e; rc == 0 && (e = fts_read(fts));) {
        lg_heartbeat();
        if (e->fts_level > 0 && e->fts_name[0] == '.') {
            fts_set(fts, e, FTS_SKIP);
        } else if (e->fts_info == FTS_DNR || e->fts_info == FTS_ERR || e->fts_info == FTS_NS) {
            rc = LG_FAIL(LG_ERR_IO, "cannot read %s: %s", e->fts_path, strerror(e->fts_errno));
        } else if (e->fts_info == FTS_SL) {
            rc = on_link(fts, e, root, out);
        } else if (e->fts_info == FTS_F && strncmp(e->fts_name, "__", 2) != 0) {
            const char *relative = e->fts_path + skip;
            while (*relative == '/') relative++;
            rc = add_file(f, relative, (uint64_t)e->fts_statp->st_size);
        }
    }
    fts_close(fts);
    return rc;
}

static bool is_seen(const struct file *f)
{
    return f->kind == LG_MEMBER_PICTURE || f->kind == LG_MEMBER_LATENT || f->kind == LG_MEMBER_CLIP;
}

/* Files of one name but for their endings. */
static int add_item(struct lg_index *x, size_t shard, const struct files *f, size_t first,
                    size_t end)
{
    const struct lg_line *line = NULL;
    bool has_caption = false;
    const struct file *seen[LG_MEMBER_KINDS] = {0};
    LG_TRY(add_entry(x, shard, f->at[first].path, f->at[first].key_len));
    for (size_t i = first; i < end; i++) {
        const struct file *of = &f->at[i];
        uint64_t at;
        if (is_seen(of) && seen[of->kind])
            leave_out(&x->left_out.same, x->left_out.first_same, of->path);
        else if (is_seen(of) && !line)
            line = lg_lines_find(&f->lines, of->path);
        seen[of->kind] = of;
        has_caption |= of->kind == LG_MEMBER_TXT || of->kind == LG_MEMBER_JSON;
        LG_TRY(add_name(x, of->path, strlen(of->path), &at));
        LG_TRY(add_member(x, of->kind, at, of->bytes));
    }
    if (line && !has_caption)
        LG_TRY(add_member(x, line->is_csv ? LG_MEMBER_FIELD : LG_MEMBER_LINE,
                          (uint64_t)line->file << LG_LINE_FILE_SHIFT | line->at, line->bytes));
    return 0;
}

static int index_folder(struct lg_index *x, size_t shard, const struct lg_source_options *o)
{
    struct files f = {.clips = o->clips, .index = x, .folder = x->shard[shard].path};
    int rc;
    struct lg_links_out links = {0};
    LG_TRY_GOTO(rc, walk(x->shard[shard].path, &f, &links), out);
    LG_TRY_GOTO(rc, lg_lines_sort(&f.lines), out);
    lg_links_out_log(&links, x->shard[shard].path);
    x->links_out += links.count;
    if (f.count) qsort(f.at, f.count, sizeof *f.at, by_key);
    for (size_t i = 0, end; i < f.count; i = end) {
        bool usable = false;
        for (end = i; end < f.count && f.at[end].key_len == f.at[i].key_len &&
                      memcmp(f.at[end].path, f.at[i].path, f.at[i].key_len) == 0;
             end++)
            usable |= is_seen(&f.at[end]);
        if (usable)
            LG_TRY_GOTO(rc, add_item(x, shard, &f, i, end), out);
        else
            leave_out(&x->left_out.alone, x->left_out.first_alone, f.at[i].path);
    }
out:
    for (size_t i = 0; i < f.count; i++) free(f.at[i].path);
    free(f.at);
    lg_lines_free(&f.lines);
    return rc;
}

/* ---- all ---- */

const char *lg_index_shard_name(const struct lg_index *x, size_t shard)
{
    if (x->shard[shard].is_folder) return "";
    const char *slash = strrchr(x->shard[shard].path, '/');
    return slash ? slash + 1 : x->shard[shard].path;
}

int lg_index_source_of(const struct lg_index *x, uint64_t item)
{
    int i = x->n_sources - 1;
    while (i > 0 && x->source[i].first > item) i--;
    return i;
}

static void hash_source(struct lg_index *x, struct lg_index_source *s, XXH3_state_t *h)
{
    XXH3_64bits_reset(h);
    for (size_t i = s->first_shard; i < s->first_shard + s->n_shards; i++) {
        const char *name = lg_index_shard_name(x, i);
        XXH3_64bits_update(h, name, strlen(name) + 1);
        XXH3_64bits_update(h, &x->shard_bytes[i], sizeof x->shard_bytes[i]);
    }
    for (size_t i = s->first; i < s->first + s->count; i++) {
        const char *key = x->names + x->entry[i].key_at;
        XXH3_64bits_update(h, key, strlen(key) + 1);
        for (size_t k = x->entry[i].first_member; k < x->entry[i + 1].first_member; k++) {
            uint32_t member[2] = {x->member[k].kind, x->member[k].bytes};
            XXH3_64bits_update(h, member, sizeof member);
            s->n_of_kind[x->member[k].kind]++;
            x->n_of_kind[x->member[k].kind]++;
        }
    }
    s->hash = XXH3_64bits_digest(h);
}

/* Of all: what sources hold, and how often they come. A data set of one source that is not repeated is its source. */
static int hash_and_count(struct lg_index *x)
{
    XXH3_state_t *h = XXH3_createState();
    if (!h) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the index of the data set");
    for (int i = 0; i < x->n_sources; i++) hash_source(x, &x->source[i], h);
    x->hash = x->source[0].hash;
    if (x->n_sources > 1 || x->source[0].repeats > 1) {
        XXH3_64bits_reset(h);
        for (int i = 0; i < x->n_sources; i++) {
            const struct lg_index_source *s = &x->source[i];
            const uint64_t of[] = {s->hash, s->count, s->repeats};
            XXH3_64bits_update(h, of, sizeof of);
            XXH3_64bits_update(h, &s->weight, sizeof s->weight);
        }
        x->hash = XXH3_64bits_digest(h);
    }
    if (!x->hash) x->hash = 1;
    XXH3_freeState(h);
    return 0;
}

/* What a source must have. */
static int check(const struct lg_index *x, const struct lg_index_source *s, const char *path,
                 const struct lg_source_options *o)
{
    const uint64_t *n = s->n_of_kind;
    if (n[LG_MEMBER_PICTURE] + n[LG_MEMBER_CLIP] + n[LG_MEMBER_LATENT] == 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.path: no picture in %s%s (%zu shards or folders, %zu samples without "
                       "a picture, %zu links out of the folder, which are not followed); looked "
                       "for .png, .jpg, .jpeg, .webp%s and .latent.safetensors",
                       path, o->clips ? "" : ", and clips are read with data.frames", s->n_shards,
                       (size_t)s->count, x->links_out,
                       o->clips ? ", .mp4, .m4v, .mov, .webm, .mkv, .gif" : "");
    if (!n[LG_MEMBER_LATENT] != !x->source[0].n_of_kind[LG_MEMBER_LATENT])
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.path: %s holds %s, unlike the first source: encode all of them before "
                       "training, or none",
                       path, n[LG_MEMBER_LATENT] ? "latents" : "pictures");
    if (o->need_caption &&
        n[LG_MEMBER_TXT] + n[LG_MEMBER_JSON] + n[LG_MEMBER_LINE] + n[LG_MEMBER_FIELD] == 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.path: no caption in %s; the model is conditioned on text: looked for "
                       ".txt and .json beside %zu pictures, and in a folder for " LG_LINES_NAME
                       " and " LG_LINES_CSV_NAME,
                       path, (size_t)s->count);
    if (o->need_label && n[LG_MEMBER_CLS] == 0)
        return LG_FAIL(LG_ERR_CONFIG,
                       "data.path: no class label in %s; the model is conditioned on classes: "
                       "looked for .cls beside %zu pictures",
                       path, (size_t)s->count);
    return 0;
}

/* Adds the shards at `path`. */
static int find_shards(struct lg_index *x, const char *path)
{
    struct lg_place *found = NULL;
    size_t n = 0, shards = x->n_shards;
    LG_TRY(lg_places_find(path, &found, &n));
    struct lg_place *all = realloc(x->shard, (shards + n) * sizeof *all);
    if (all) x->shard = all;
    uint64_t *bytes = realloc(x->shard_bytes, (shards + n) * sizeof *bytes);
    if (bytes) x->shard_bytes = bytes;
    if (!all || !bytes) {
        lg_places_free(&found, n);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for the list of shards");
    }
    memcpy(all + shards, found, n * sizeof *all);
    memset(bytes + shards, 0, n * sizeof *bytes);
    free(found);
    x->n_shards += n;
    return 0;
}

static int index_source(struct lg_index *x, const struct lg_source_spec *spec,
                        const struct lg_source_options *options, struct lg_index_source *s)
{
    *s = (struct lg_index_source){.first_shard = x->n_shards,
                                  .first = x->count,
                                  .repeats = spec->repeats,
                                  .weight = spec->weight};
    LG_TRY(find_shards(x, spec->path));
    s->n_shards = x->n_shards - s->first_shard;
    for (size_t i = s->first_shard; i < x->n_shards; i++) {
        if (x->shard[i].is_folder)
            LG_TRY(index_folder(x, i, options));
        else
            LG_TRY(index_tar(x, i, options));
    }
    s->count = x->count - s->first;
    return 0;
}

/* The message names the source instead of data.path. */
static int of_source(int rc, int i, bool only)
{
    static const char path[] = "data.path";
    const char *why = lg_err_message();
    if (rc == 0 || only) return rc < 0 ? lg_err_frame(rc, __FILE__, __LINE__, __func__) : rc;
    if (!strncmp(why, path, sizeof path - 1)) why += sizeof path - 1;
    return LG_FAIL(rc, "data.source[%d]%s%s", i, *why == ':' || *why == ' ' ? "" : ": ", why);
}

static int build(const struct lg_source_spec *spec, int n, const struct lg_source_options *options,
                 struct lg_index *x)
{
    x->source = calloc((size_t)n, sizeof *x->source);
    if (!x->source) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the list of sources");
    for (x->n_sources = 0; x->n_sources < n; x->n_sources++) {
        const int i = x->n_sources;
        LG_TRY(of_source(index_source(x, &spec[i], options, &x->source[i]), i, n == 1));
    }
    LG_TRY(grow((void **)&x->entry, &x->entry_capacity, x->count + 1, sizeof *x->entry));
    x->entry[x->count] = (struct lg_index_entry){.first_member = (uint32_t)x->n_members};
    LG_TRY(hash_and_count(x));
    for (int i = 0; i < n; i++)
        LG_TRY(of_source(check(x, &x->source[i], spec[i].path, options), i, n == 1));
    return 0;
}

int lg_index_build(const struct lg_source_spec *spec, int n,
                   const struct lg_source_options *options, struct lg_index *ret)
{
    struct lg_index x = {0};
    int rc;
    LG_TRY_GOTO(rc, build(spec, n, options, &x), fail);
    *ret = x;
    return 0;
fail:
    lg_index_free(&x);
    return rc;
}

void lg_index_free(struct lg_index *x)
{
    lg_places_free(&x->shard, x->n_shards);
    free(x->source);
    free(x->shard_bytes);
    free(x->line_file);
    free(x->entry);
    free(x->member);
    free(x->names);
    *x = (struct lg_index){0};
}
