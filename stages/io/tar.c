/* Scan of tar headers; see tar.h. Writing is in tar_write.c.
 *
 * Design: a tar is a row of blocks of 512 bytes: a header, then the content padded to whole blocks.
 * The scan reads only around headers, READ_BYTES at a time, which takes in the next headers as well
 * when members are small. Extension headers (pax 'x' and 'g', GNU 'L') change the name or size of
 * the member after them. Two zero blocks end an archive; what follows is scanned too, since
 * archives may be joined by cat.
 *
 * Invariants: `at` is a multiple of 512 and only grows, so the scan ends; no size from the file is
 * used to allocate or to move before it was compared with its bound and with the end of the file.
 */
#include "stages/io/tar.h"
#include "base/heartbeat.h"
#include "base/log.h"
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { READ_BYTES = 8192 };

/* Fields of a header as (offset, length). */
enum {
    NAME_AT = 0,
    NAME_LEN = 100,
    SIZE_AT = 124,
    SIZE_LEN = 12,
    SUM_AT = 148,
    SUM_LEN = 8,
    TYPE_AT = 156,
    MAGIC_AT = 257,
    PREFIX_AT = 345,
    PREFIX_LEN = 155
};

struct scan {
    int fd;
    const char *path;
    uint64_t at, end; /* of the next header; of the file */
    /* A piece of the file around `at`. */
    uint8_t buf[READ_BYTES];
    uint64_t buf_at;
    size_t buf_len;
    /* What extension headers said about the next member. */
    char name[LG_TAR_NAME_MAX];
    bool has_name, has_size;
    uint64_t size;
    bool ended; /* since the last header, a zero block was seen */
};

static int read_at(const struct scan *s, void *dst, size_t bytes, uint64_t at, size_t *ret_got)
{
    size_t got = 0;
    while (got < bytes) {
        ssize_t n = pread(s->fd, (char *)dst + got, bytes - got, (off_t)(at + got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0)
            return LG_FAIL(LG_ERR_IO, "reading %s at byte %llu: %s", s->path,
                           (unsigned long long)(at + got), strerror(errno));
        if (n == 0) break;
        got += (size_t)n;
    }
    lg_heartbeat();
    *ret_got = got;
    return 0;
}

/* The block at s->at, or NULL when the file ends before its last byte. */
static int block(struct scan *s, const uint8_t **ret)
{
    *ret = NULL;
    if (s->end - s->at < LG_TAR_BLOCK) return 0;
    if (s->at < s->buf_at || s->at + LG_TAR_BLOCK > s->buf_at + s->buf_len) {
        LG_TRY(read_at(s, s->buf, READ_BYTES, s->at, &s->buf_len));
        s->buf_at = s->at;
        if (s->buf_len < LG_TAR_BLOCK)
            return LG_FAIL(LG_ERR_IO, "%s became shorter while it was read", s->path);
    }
    *ret = s->buf + (s->at - s->buf_at);
    return 0;
}

static int damaged(const struct scan *s, const char *what)
{
    return LG_FAIL(LG_ERR_CORRUPT,
                   "%s: %s at byte %llu: not a tar archive, compressed, or damaged; pack the shard "
                   "again (plain .tar)",
                   s->path, what, (unsigned long long)s->at);
}

/* A number field: octal text, or base 256 when the first byte has its high bit set. */
static bool parse_number(const uint8_t *f, size_t len, uint64_t *ret)
{
    uint64_t v = 0;
    if (f[0] & 0x80) {
        if (f[0] != 0x80) return false; /* negative or beyond 64 bits */
        for (size_t i = 1; i < len; i++) {
            if (v >> 55) return false;
            v = v << 8 | f[i];
        }
        *ret = v;
        return true;
    }
    size_t i = 0;
    while (i < len && f[i] == ' ') i++;
    for (; i < len && f[i] >= '0' && f[i] <= '7'; i++) v = v << 3 | (uint64_t)(f[i] - '0');
    if (i < len && f[i] != ' ' && f[i] != 0) return false;
    *ret = v;
    return true;
}

/* The sum of all bytes with the sum's own field taken as spaces; old tars summed signed chars. */
static bool checksum_holds(const uint8_t *b)
{
    uint64_t want;
    if (!parse_number(b + SUM_AT, SUM_LEN, &want)) return false;
    uint64_t sum = 0;
    int64_t sum_signed = 0;
    for (int i = 0; i < LG_TAR_BLOCK; i++) {
        uint8_t c = i >= SUM_AT && i < SUM_AT + SUM_LEN ? ' ' : b[i];
        sum += c;
        sum_signed += (int8_t)c;
    }
    return want == sum || (sum_signed >= 0 && want == (uint64_t)sum_signed);
}

static bool is_zero(const uint8_t *b)
{
    return b[0] == 0 && memcmp(b, b + 1, LG_TAR_BLOCK - 1) == 0;
}

/* Copies a field that ends at its first NUL or its length. */
static size_t copy_field(char *dst, const uint8_t *f, size_t len)
{
    size_t n = strnlen((const char *)f, len);
    memcpy(dst, f, n);
    dst[n] = 0;
    return n;
}

static void header_name(struct scan *s, const uint8_t *b)
{
    size_t n = 0;
    /* "ustar\0" has a prefix; GNU's "ustar " keeps other things there. */
    if (memcmp(b + MAGIC_AT, "ustar", 6) == 0 && b[PREFIX_AT]) {
        n = copy_field(s->name, b + PREFIX_AT, PREFIX_LEN);
        s->name[n++] = '/';
    }
    copy_field(s->name + n, b + NAME_AT, NAME_LEN);
}

static int set_name(struct scan *s, const char *name, size_t len)
{
    len = strnlen(name, len);
    if (len >= LG_TAR_NAME_MAX) return damaged(s, "a name of more than 4095 bytes");
    memcpy(s->name, name, len);
    s->name[len] = 0;
    s->has_name = true;
    return 0;
}

/* Records "<length> <key>=<value>\n"; length counts the whole record. */
static int parse_pax(struct scan *s, const char *p, size_t bytes)
{
    while (bytes && *p) {
        size_t len = 0, i = 0;
        while (i < bytes && i < 8 && p[i] >= '0' && p[i] <= '9')
            len = len * 10 + (size_t)(p[i++] - '0');
        if (i == 0 || i >= bytes || p[i] != ' ' || len < i + 3 || len > bytes || p[len - 1] != '\n')
            return damaged(s, "a malformed pax record");
        const char *key = p + i + 1, *eq = memchr(key, '=', len - i - 2);
        if (!eq) return damaged(s, "a pax record without '='");
        size_t key_len = (size_t)(eq - key), value_len = (size_t)(p + len - 1 - (eq + 1));
        if (key_len == 4 && memcmp(key, "path", 4) == 0) {
            LG_TRY(set_name(s, eq + 1, value_len));
        } else if (key_len == 4 && memcmp(key, "size", 4) == 0) {
            uint64_t v = 0;
            if (value_len == 0 || value_len > 18) return damaged(s, "a pax size out of range");
            for (size_t k = 0; k < value_len; k++) {
                if (eq[1 + k] < '0' || eq[1 + k] > '9') return damaged(s, "a malformed pax size");
                v = v * 10 + (uint64_t)(eq[1 + k] - '0');
            }
            s->size = v;
            s->has_size = true;
        }
        p += len;
        bytes -= len;
    }
    return 0;
}

/* An extension header's content, `size` bytes after the header at s->at. */
static int extension(struct scan *s, char type, uint64_t size)
{
    if (size > LG_TAR_EXTENSION_MAX) return damaged(s, "an extension header of more than 1 MiB");
    char *text = malloc(size + 1);
    if (!text) return LG_FAIL(LG_ERR_NOSPACE, "no memory for a header of %s", s->path);
    size_t got = 0;
    int rc;
    LG_TRY_GOTO(rc, read_at(s, text, size, s->at + LG_TAR_BLOCK, &got), out);
    text[got] = 0;
    if (got < size)
        rc = LG_FAIL(LG_ERR_IO, "%s became shorter while it was read", s->path);
    else if (type == 'L')
        rc = set_name(s, text, size);
    else
        rc = parse_pax(s, text, size);
out:
    free(text);
    return rc;
}

static int cut(const struct scan *s, const char *name, struct lg_tar_cut *ret_cut)
{
    if (ret_cut) {
        ret_cut->offset = s->end;
        memcpy(ret_cut->name, name, strlen(name) + 1);
    }
    return LG_FAIL(LG_ERR_CORRUPT,
                   "%s is cut short: it ends at byte %llu %s%s; copy or download it again", s->path,
                   (unsigned long long)s->end,
                   name[0] ? "within " : "without the end mark of a tar archive", name);
}

/* One header and what belongs to it. */
static int member(struct scan *s, const uint8_t *b, lg_tar_member_fn fn, void *ctx,
                  struct lg_tar_cut *ret_cut)
{
    uint64_t size;
    char type = (char)b[TYPE_AT];
    if (!parse_number(b + SIZE_AT, SIZE_LEN, &size)) return damaged(s, "a malformed size");
    bool is_extension = type == 'x' || type == 'g' || type == 'L' || type == 'K';
    bool is_file = type == '0' || type == 0 || type == '7';
    if (!is_extension && s->has_size) size = s->size;
    if (!is_extension && !s->has_name) header_name(s, b);
    if (type >= '1' && type <= '6') size = 0; /* links, devices, folders: a size is no content */
    uint64_t left = s->end - s->at - LG_TAR_BLOCK;
    if (size > left) return cut(s, is_extension ? "a header" : s->name, ret_cut);
    if (is_extension && type != 'K' && type != 'g') {
        LG_TRY(extension(s, type, size));
    } else if (!is_extension) {
        if (is_file) {
            struct lg_tar_member m = {s->name, s->at + LG_TAR_BLOCK, size};
            LG_TRY(fn(ctx, &m));
        }
        s->has_name = s->has_size = false;
    }
    /* The padding of the last member may be missing; then the end mark is, too. */
    uint64_t padded = (size + LG_TAR_BLOCK - 1) / LG_TAR_BLOCK * LG_TAR_BLOCK;
    s->at += LG_TAR_BLOCK + LG_MIN(padded, left);
    return 0;
}

int lg_tar_scan(int fd, const char *path, lg_tar_member_fn fn, void *ctx,
                struct lg_tar_cut *ret_cut)
{
    struct stat st;
    if (fstat(fd, &st) < 0) return LG_FAIL(LG_ERR_IO, "cannot stat %s: %s", path, strerror(errno));
    struct scan *s = calloc(1, sizeof *s);
    if (!s) return LG_FAIL(LG_ERR_NOSPACE, "no memory to read %s", path);
    *s = (struct scan){.fd = fd, .path = path, .end = (uint64_t)st.st_size};
    int rc = 0;
    for (;;) {
        const uint8_t *b;
        LG_TRY_GOTO(rc, block(s, &b), out);
        if (!b) break;
        if (is_zero(b)) {
            s->ended = true;
            s->at += LG_TAR_BLOCK;
        } else if (checksum_holds(b)) {
            s->ended = false;
            LG_TRY_GOTO(rc, member(s, b, fn, ctx, ret_cut), out);
        } else if (s->ended) {
            lg_log(LG_WARN, "%s: ignored what follows the end of the archive at byte %llu", path,
                   (unsigned long long)s->at);
            break;
        } else {
            rc = damaged(s, "no header");
            goto out;
        }
    }
    if (!s->ended || s->has_name || s->has_size) rc = cut(s, "", ret_cut);
out:
    free(s);
    return rc;
}
