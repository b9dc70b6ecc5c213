/* Writing safetensors; see safetensors.h.
 *
 * Tensors are declared first and streamed after, so that a checkpoint is never in memory as a
 * whole. The bytes go to a temporary beside the path, which is renamed at the end: a file under its
 * name is complete. */
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    PREFIX_BYTES = 8,             /* the header's length */
    HEADER_BYTES_MAX = 100000000, /* the limit of the reference implementation */
    SHAPE_RANK_MAX = 8,
    WRITE_BUFFER_BYTES = 1 << 20,
};
#define INTEGER_MAX 9007199254740992.0 /* 2^53: what a JSON number holds exactly */

struct lg_st_writer {
    char *path; /* NULL: memory */
    char *tmp;
    int fd;
    cJSON *root, *metadata; /* metadata is a child of root once there is any */
    int count;
    uint64_t data_bytes, data_written;
    bool started; /* the header is out, nothing more can be declared */
    XXH3_state_t *hash;
    char *buffer; /* file: WRITE_BUFFER_BYTES; memory: everything so far */
    size_t filled, room;
};

static int writer_new(lg_st_writer **ret)
{
    lg_st_writer *w = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a safetensors writer");
    w->fd = -1;
    w->root = cJSON_CreateObject();
    w->hash = XXH3_createState();
    w->buffer = malloc(WRITE_BUFFER_BYTES);
    w->room = WRITE_BUFFER_BYTES;
    if (!w->root || !w->hash || !w->buffer) {
        lg_st_writer_abort(&w);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for a safetensors writer");
    }
    XXH3_64bits_reset(w->hash);
    *ret = w;
    return 0;
}

int lg_st_writer_open(const char *path, lg_st_writer **ret)
{
    lg_st_writer *w = NULL;
    LG_TRY(writer_new(&w));
    w->path = strdup(path);
    if (!w->path || asprintf(&w->tmp, "%s.tmp.%d", path, (int)getpid()) < 0) {
        w->tmp = NULL;
        lg_st_writer_abort(&w);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory to open %s", path);
    }
    w->fd = open(w->tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (w->fd < 0) {
        int e = errno;
        lg_st_writer_abort(&w);
        return LG_FAIL(lg_err_from_errno(e), "cannot write %s: %s", path, strerror(e));
    }
    *ret = w;
    return 0;
}

int lg_st_writer_open_memory(lg_st_writer **ret)
{
    return writer_new(ret);
}

int lg_st_writer_metadata(lg_st_writer *w, const char *key, const char *value)
{
    LG_ASSERT(!w->started);
    if (!w->metadata) w->metadata = cJSON_AddObjectToObject(w->root, "__metadata__");
    if (!w->metadata || !cJSON_AddStringToObject(w->metadata, key, value))
        return LG_FAIL(LG_ERR_NOSPACE, "no memory for metadata");
    return 0;
}

int lg_st_writer_declare(lg_st_writer *w, const char *name, lg_dtype dtype, int rank,
                         const int64_t *dim)
{
    LG_ASSERT(!w->started && rank >= 0 && rank <= SHAPE_RANK_MAX && lg_dtype_bytes(dtype));
    LG_ASSERT(strcmp(name, "__metadata__") && !cJSON_GetObjectItemCaseSensitive(w->root, name));
    uint64_t bytes = lg_dtype_bytes(dtype);
    cJSON *j = cJSON_AddObjectToObject(w->root, name);
    cJSON *ok = j ? cJSON_AddStringToObject(j, "dtype", lg_st_type_name(dtype)) : NULL;
    cJSON *shape = ok ? cJSON_AddArrayToObject(j, "shape") : NULL;
    for (int i = 0; shape && i < rank; i++) {
        bool fits = dim[i] >= 0 && !__builtin_mul_overflow(bytes, (uint64_t)dim[i], &bytes);
        LG_ASSERT(fits);
        if (!cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)dim[i]))) shape = NULL;
    }
    uint64_t end = w->data_bytes + bytes;
    LG_ASSERT(end >= bytes && (double)end < INTEGER_MAX);
    double offset[2] = {(double)w->data_bytes, (double)end};
    cJSON *offsets = shape ? cJSON_CreateDoubleArray(offset, 2) : NULL;
    if (!offsets || !cJSON_AddItemToObject(j, "data_offsets", offsets))
        return LG_FAIL(LG_ERR_NOSPACE, "no memory to declare tensor \"%s\"", name);
    w->data_bytes = end;
    w->count++;
    return 0;
}

static int flush(lg_st_writer *w)
{
    if (!w->path || !w->filled) return 0;
    int rc = lg_write_all(w->fd, w->buffer, w->filled);
    if (rc < 0) return LG_FAIL(rc, "cannot write %s: %s", w->path, lg_err_message());
    w->filled = 0;
    return 0;
}

static int put(lg_st_writer *w, const void *data, size_t bytes)
{
    XXH3_64bits_update(w->hash, data, bytes);
    if (w->path && bytes >= w->room) { /* large: past the buffer */
        LG_TRY(flush(w));
        int rc = lg_write_all(w->fd, data, bytes);
        return rc < 0 ? LG_FAIL(rc, "cannot write %s: %s", w->path, lg_err_message()) : 0;
    }
    if (w->path && bytes > w->room - w->filled) LG_TRY(flush(w));
    if (bytes > w->room - w->filled) { /* memory only */
        size_t room = LG_MAX(2 * w->room, w->filled + bytes);
        char *p = realloc(w->buffer, room);
        if (!p) return LG_FAIL(LG_ERR_NOSPACE, "no memory for %zu bytes of safetensors", room);
        w->buffer = p;
        w->room = room;
    }
    memcpy(w->buffer + w->filled, data, bytes);
    w->filled += bytes;
    return 0;
}

static int start(lg_st_writer *w)
{
    w->started = true;
    char *text = cJSON_PrintUnformatted(w->root);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a header of %d tensors", w->count);
    size_t length = strlen(text), padded = (length + 7) / 8 * 8;
    unsigned char prefix[PREFIX_BYTES];
    for (int i = 0; i < PREFIX_BYTES; i++) prefix[i] = (unsigned char)((uint64_t)padded >> (8 * i));
    int rc = 0;
    if (padded > HEADER_BYTES_MAX)
        rc = LG_FAIL(LG_ERR_FAILED, "a header of %zu bytes: readers accept %d", padded,
                     HEADER_BYTES_MAX);
    if (rc == 0) rc = put(w, prefix, sizeof prefix);
    if (rc == 0) rc = put(w, text, length);
    if (rc == 0) rc = put(w, "        ", padded - length);
    free(text);
    return rc;
}

int lg_st_writer_data(lg_st_writer *w, const void *data, size_t bytes)
{
    if (!w->started) LG_TRY(start(w));
    LG_ASSERT(bytes <= w->data_bytes - w->data_written);
    w->data_written += bytes;
    LG_TRY(put(w, data, bytes));
    return 0;
}

/* The header of a file without data, the rest of the buffer. */
static int complete(lg_st_writer *w)
{
    if (!w->started) LG_TRY(start(w));
    LG_ASSERT(w->data_written == w->data_bytes);
    return flush(w);
}

static int publish(lg_st_writer *w)
{
    char dir[LG_PATH_BYTES];
    LG_TRY(complete(w));
    LG_TRY(lg_path(dir, "%s", w->path));
    char *slash = strrchr(dir, '/');
    if (slash)
        slash[slash == dir] = 0;
    else
        strcpy(dir, ".");
    if (lg_fsync(w->fd) < 0 || rename(w->tmp, w->path) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot publish %s: %s", w->path, strerror(errno));
    free(w->tmp);
    w->tmp = NULL;
    return lg_fsync_dir(dir);
}

int lg_st_writer_finish(lg_st_writer **w, uint64_t *ret_hash)
{
    LG_ASSERT((*w)->path);
    int rc = publish(*w);
    if (rc == 0 && ret_hash) *ret_hash = XXH3_64bits_digest((*w)->hash);
    lg_st_writer_abort(w);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

int lg_st_writer_finish_memory(lg_st_writer **w, void **ret_data, size_t *ret_bytes)
{
    LG_ASSERT(!(*w)->path);
    int rc = complete(*w);
    if (rc == 0) {
        *ret_data = (*w)->buffer;
        *ret_bytes = (*w)->filled;
        (*w)->buffer = NULL;
    }
    lg_st_writer_abort(w);
    if (rc < 0) return lg_err_frame(rc, __FILE__, __LINE__, __func__);
    return 0;
}

void lg_st_writer_abort(lg_st_writer **w)
{
    if (!*w) return;
    if ((*w)->fd >= 0) close((*w)->fd);
    if ((*w)->tmp && (*w)->fd >= 0) unlink((*w)->tmp);
    cJSON_Delete((*w)->root);
    XXH3_freeState((*w)->hash);
    free((*w)->buffer);
    free((*w)->tmp);
    free((*w)->path);
    free(*w);
    *w = NULL;
}
