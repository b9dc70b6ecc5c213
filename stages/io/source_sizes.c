/* The sizes of pictures and clips of a data set, those of all remembered in a file; see source.h.
 *
 * The file: a head of four words and (count) sizes. Its hash covers all of it, so that a file of another build or data
 * set, or a damaged one, is found and made again. What the pictures are may only change with the data set's
 * fingerprint; if one changes under the same name and size, loaders still agree with each other by the order's hash. */
#include "base/fs.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include "stages/io/source_private.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_BYTES = 4096 /* of a picture, which mostly show its size */ };

struct head {
    char magic[8];
    uint64_t source, count;
    uint64_t hash; /* of the sizes and the words before */
};
static const char MAGIC[8] = {'l', 'g', 's', 'i', 'z', 'e', 's', '4'};

/* ---- of an item ---- */

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
        LG_TRY(lg_item_reserve(&s->head, have));
        LG_TRY(lg_source_read_member(s, shard, m, have, s->head.data));
        LG_TRY(lg_picture_size(s->head.data, have, &need, ret));
    }
    return 0;
}

static int look_at_clip(lg_source *s, size_t shard, const struct lg_index_member *m,
                        struct lg_item_size *ret)
{
    struct lg_item_clip film;
    struct lg_clip_info info;
    lg_item_clip_open(s, shard, m, &film);
    int rc = lg_clip_look(&film.input, &info);
    lg_item_clip_close(&film);
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

/* ---- of all ---- */

static size_t file_bytes(uint64_t count)
{
    return sizeof(struct head) + count * sizeof(struct lg_item_size);
}

static uint64_t hash_of(const char *file, uint64_t count)
{
    struct head h;
    memcpy(&h, file, sizeof h);
    h.hash = lg_hash(file + sizeof h, file_bytes(count) - sizeof h);
    return lg_hash(&h, sizeof h);
}

/* False: there is none that serves. */
static bool load(const lg_source *s, const char *path, struct lg_item_size *ret)
{
    const uint64_t count = lg_source_count(s);
    char *file = NULL;
    size_t bytes = 0;
    struct head h;
    bool well = lg_path_exists(path) && lg_read_file(path, file_bytes(count), &file, &bytes) == 0 &&
                bytes == file_bytes(count);
    if (well) memcpy(&h, file, sizeof h);
    well = well && !memcmp(h.magic, MAGIC, sizeof MAGIC) && h.source == lg_source_hash(s) &&
           h.count == count && h.hash == hash_of(file, count);
    if (well) memcpy(ret, file + sizeof h, bytes - sizeof h);
    free(file);
    lg_err_clear();
    return well;
}

static int save(const lg_source *s, const char *path, const struct lg_item_size *size)
{
    struct head h = {.source = lg_source_hash(s), .count = lg_source_count(s)};
    char *file = malloc(file_bytes(h.count));
    if (!file) return LG_FAIL(LG_ERR_NOSPACE, "no memory to write %s", path);
    memcpy(h.magic, MAGIC, sizeof MAGIC);
    memcpy(file, &h, sizeof h);
    memcpy(file + sizeof h, size, file_bytes(h.count) - sizeof h);
    h.hash = hash_of(file, h.count);
    memcpy(file, &h, sizeof h);
    int rc = lg_publish_file(path, file, file_bytes(h.count));
    free(file);
    LG_TRY(rc);
    return 0;
}

static int look(lg_source *s, struct lg_item_size *ret)
{
    uint64_t unreadable = 0;
    for (uint64_t i = 0; i < lg_source_count(s); i++) {
        int rc = lg_source_size(s, i, &ret[i]);
        lg_heartbeat();
        if (rc == LG_ERR_VOID) {
            lg_err_clear();
            unreadable++;
            continue;
        }
        LG_TRY(rc);
    }
    if (unreadable)
        lg_log(LG_WARN, "%" PRIu64 " of %" PRIu64 " samples show no picture's size", unreadable,
               lg_source_count(s));
    return 0;
}

int lg_source_sizes(lg_source *s, const char *cache, struct lg_item_size **ret)
{
    struct lg_item_size *size = calloc(lg_source_count(s), sizeof *size);
    if (!size) return LG_FAIL(LG_ERR_NOSPACE, "no memory for the sizes of the pictures");
    if (!cache || !load(s, cache, size)) {
        int rc = look(s, size);
        if (rc < 0) {
            free(size);
            return lg_err_frame(rc, __FILE__, __LINE__, __func__);
        }
        if (cache && save(s, cache, size) < 0) {
            lg_log_error("the sizes of the pictures could not be kept");
            lg_err_clear();
        }
    }
    *ret = size;
    return 0;
}
