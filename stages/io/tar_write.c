/* Writing of tar shards; see tar.h. Plain ustar with nothing in it that depends on who wrote it or
 * when, so that equal content gives equal bytes. */
#include "base/fs.h"
#include "stages/io/tar.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct lg_tar_writer {
    char path[LG_PATH_BYTES], tmp[LG_PATH_BYTES];
    FILE *file;
};

struct ustar_header {
    char name[100], mode[8], uid[8], gid[8], size[12], mtime[12], sum[8], type, link[100], magic[6],
        version[2], user[32], group[32], dev_major[8], dev_minor[8], prefix[155], pad[12];
};
_Static_assert(sizeof(struct ustar_header) == LG_TAR_BLOCK, "a ustar header is one block");

int lg_tar_writer_open(const char *path, lg_tar_writer **ret)
{
    lg_tar_writer *w = calloc(1, sizeof *w);
    if (!w) return LG_FAIL(LG_ERR_NOSPACE, "no memory to write %s", path);
    int rc;
    LG_TRY_GOTO(rc, lg_path(w->path, "%s", path), fail);
    LG_TRY_GOTO(rc, lg_path(w->tmp, "%s.tmp.%d", path, (int)getpid()), fail);
    w->file = fopen(w->tmp, "wbe");
    if (!w->file) {
        rc = LG_FAIL(lg_err_from_errno(errno), "cannot create %s: %s", w->tmp, strerror(errno));
        goto fail;
    }
    *ret = w;
    return 0;
fail:
    lg_tar_writer_abort(&w);
    return rc;
}

/* Name of up to 100 bytes, or a prefix of up to 155 before a slash. */
static bool put_name(struct ustar_header *h, const char *name)
{
    size_t len = strlen(name);
    if (len == 0) return false;
    if (len <= sizeof h->name) {
        memcpy(h->name, name, len);
        return true;
    }
    for (const char *slash = strchr(name, '/'); slash; slash = strchr(slash + 1, '/')) {
        size_t prefix = (size_t)(slash - name), rest = len - prefix - 1;
        if (prefix == 0 || prefix > sizeof h->prefix || rest == 0 || rest > sizeof h->name)
            continue;
        memcpy(h->prefix, name, prefix);
        memcpy(h->name, slash + 1, rest);
        return true;
    }
    return false;
}

static int put(lg_tar_writer *w, const void *data, size_t bytes)
{
    if (bytes && fwrite(data, 1, bytes, w->file) != bytes)
        return LG_FAIL(lg_err_from_errno(errno), "writing %s: %s", w->tmp, strerror(errno));
    return 0;
}

int lg_tar_writer_add(lg_tar_writer *w, const char *name, const void *data, size_t bytes)
{
    static const uint8_t zeros[LG_TAR_BLOCK];
    struct ustar_header h = {0};
    if (!put_name(&h, name))
        return LG_FAIL(LG_ERR_USAGE, "name does not fit a tar header: %.200s", name);
    if (bytes > 077777777777ULL)
        return LG_FAIL(LG_ERR_USAGE, "%s: %zu bytes do not fit a tar header", name, bytes);
    memcpy(h.mode, "0000644", 8);
    memcpy(h.uid, "0000000", 8);
    memcpy(h.gid, "0000000", 8);
    memcpy(h.mtime, "00000000000", 12);
    snprintf(h.size, sizeof h.size, "%011llo", (unsigned long long)bytes);
    h.type = '0';
    memcpy(h.magic, "ustar", 6);
    memcpy(h.version, "00", 2);
    memset(h.sum, ' ', sizeof h.sum);
    unsigned sum = 0;
    for (size_t i = 0; i < sizeof h; i++) sum += ((const uint8_t *)&h)[i];
    snprintf(h.sum, sizeof h.sum, "%06o", sum & 0777777); /* six digits, NUL, space */
    h.sum[7] = ' ';
    LG_TRY(put(w, &h, sizeof h));
    LG_TRY(put(w, data, bytes));
    LG_TRY(put(w, zeros, (LG_TAR_BLOCK - bytes % LG_TAR_BLOCK) % LG_TAR_BLOCK));
    return 0;
}

static int finish(lg_tar_writer *w)
{
    static const uint8_t zeros[2 * LG_TAR_BLOCK];
    char dir[LG_PATH_BYTES];
    LG_TRY(put(w, zeros, sizeof zeros));
    if (fflush(w->file) != 0 || fsync(fileno(w->file)) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "writing %s: %s", w->tmp, strerror(errno));
    if (rename(w->tmp, w->path) < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot rename %s to %s: %s", w->tmp, w->path,
                       strerror(errno));
    w->tmp[0] = 0;
    LG_TRY(lg_path(dir, "%s", w->path));
    char *slash = strrchr(dir, '/');
    if (slash)
        slash[slash == dir] = 0;
    else
        strcpy(dir, ".");
    LG_TRY(lg_fsync_dir(dir));
    return 0;
}

int lg_tar_writer_finish(lg_tar_writer **w)
{
    int rc = finish(*w);
    lg_tar_writer_abort(w);
    return rc;
}

void lg_tar_writer_abort(lg_tar_writer **w)
{
    if (!*w) return;
    if ((*w)->file) {
        fclose((*w)->file);
        if ((*w)->tmp[0]) unlink((*w)->tmp);
    }
    free(*w);
    *w = NULL;
}
