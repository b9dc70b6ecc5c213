/* The sizes of all pictures and clips of a data set, remembered in a file; see source.h.
 *
 * The file: a head of four words and (count) sizes. Its hash covers all of it, so that a file of another build or data
 * set, or a damaged one, is found and made again. What the pictures are may only change with the data set's
 * fingerprint; if one changes under the same name and size, loaders still agree with each other by the order's hash. */
#include "base/fs.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include "stages/io/source.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

struct head {
    char magic[8];
    uint64_t source, count;
    uint64_t hash; /* of the sizes and the words before */
};
static const char MAGIC[8] = {'l', 'g', 's', 'i', 'z', 'e', 's', '2'};

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
