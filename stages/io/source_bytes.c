/* The bytes of items; see source.h.
 *
 * Files are read with pread on descriptors that stay open, the least recently used one being closed
 * when LG_SOURCE_FDS_MAX are. Every failing read is LG_ERR_IO, also when a file has become shorter
 * or is gone: the data set was whole when it was indexed, so this is a matter of the machine, not
 * of the sample. Only content that can never be used makes a sample void. */
#include "base/beneath.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "stages/io/source_private.h"
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int shard_fd(lg_source *s, size_t shard, int *ret_fd)
{
    struct lg_open_shard *oldest = &s->open[0];
    s->reads++;
    for (int i = 0; i < LG_SOURCE_FDS_MAX; i++) {
        struct lg_open_shard *o = &s->open[i];
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
    *oldest = (struct lg_open_shard){.fd = fd, .shard = shard, .used = s->reads};
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

/* A file in a folder, of this size when it was indexed. */
static int open_in_folder(const lg_source *s, size_t shard, uint64_t name_at, uint64_t bytes,
                          char ret_path[LG_PATH_BYTES], int *ret_fd)
{
    const struct lg_place *place = &s->index.shard[shard];
    const char *name = s->index.names + name_at;
    LG_TRY(lg_path(ret_path, "%s/%s", place->path, name));
    int fd = lg_open_beneath(place->path, name);
    if (fd < 0)
        return LG_FAIL(LG_ERR_IO, "cannot open %s: %s", ret_path,
                       errno == EXDEV ? "it leads out of the folder now" : strerror(errno));
    struct stat st;
    if (fstat(fd, &st) < 0 || LG_MIN((uint64_t)st.st_size, UINT32_MAX) != bytes) {
        close(fd);
        return LG_FAIL(LG_ERR_IO, "%s has changed since the run began; put the old file back",
                       ret_path);
    }
    *ret_fd = fd;
    return 0;
}

static int open_member(const lg_source *s, size_t shard, const struct lg_index_member *m,
                       char ret_path[LG_PATH_BYTES], int *ret_fd)
{
    return open_in_folder(s, shard, m->at, m->bytes, ret_path, ret_fd);
}

/* The file that a line or a field stands in, and where. */
static int open_line(const lg_source *s, size_t shard, const struct lg_index_member *m,
                     char ret_path[LG_PATH_BYTES], int *ret_fd, uint64_t *ret_at)
{
    const struct lg_index_line_file *f = &s->index.line_file[m->at >> LG_LINE_FILE_SHIFT];
    *ret_at = m->at & ((UINT64_C(1) << LG_LINE_FILE_SHIFT) - 1);
    return open_in_folder(s, shard, f->name_at, f->bytes, ret_path, ret_fd);
}

/* Its first bytes. */
int lg_source_read_member(lg_source *s, size_t shard, const struct lg_index_member *m, size_t bytes,
                          char *dst)
{
    char path[LG_PATH_BYTES];
    int fd;
    if (!s->index.shard[shard].is_folder) {
        LG_TRY(read_from_tar(s, shard, m->at, dst, bytes));
        return 0;
    }
    uint64_t at = 0;
    if (m->kind == LG_MEMBER_LINE || m->kind == LG_MEMBER_FIELD)
        LG_TRY(open_line(s, shard, m, path, &fd, &at));
    else
        LG_TRY(open_member(s, shard, m, path, &fd));
    int rc = read_exactly(fd, path, at, dst, bytes);
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

void lg_item_clip_close(struct lg_item_clip *c)
{
    if (c->fd) close(c->fd - 1);
    *c = (struct lg_item_clip){0};
}

void lg_item_clip_open(lg_source *s, size_t shard, const struct lg_index_member *m,
                       struct lg_item_clip *ret)
{
    *ret = (struct lg_item_clip){.source = s, .shard = shard, .member = m};
    ret->input = (struct lg_clip_input){.read = read_clip, .arg = ret, .bytes = m->bytes};
}
