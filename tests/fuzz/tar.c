/* Fuzz target: a tar archive, scanned as it is and again with the sums of its headers set right,
 * which a mutation hardly ever does by itself. Every member must lie within the file. */
#include "stages/io/tar.h"
#include "tests/fuzz/fuzz.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUM_AT = 148, SUM_LEN = 8 };

struct seen {
    uint64_t file_bytes, end;
};

static int on_member(void *ctx, const struct lg_tar_member *m)
{
    struct seen *s = ctx;
    LG_ASSERT(m->name && strlen(m->name) < LG_TAR_NAME_MAX);
    LG_ASSERT(m->offset >= LG_TAR_BLOCK && m->offset % LG_TAR_BLOCK == 0 && m->offset > s->end);
    LG_ASSERT(m->offset <= s->file_bytes && m->size <= s->file_bytes - m->offset);
    s->end = m->offset + m->size;
    return 0;
}

static void scan(const uint8_t *data, size_t bytes)
{
    struct seen seen = {.file_bytes = bytes};
    const char *path = lg_fuzz_file(0, data, bytes);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    LG_ASSERT(fd >= 0);
    struct lg_tar_cut *cut = calloc(1, sizeof *cut);
    LG_ASSERT(cut);
    cut->offset = UINT64_MAX;
    int rc = lg_tar_scan(fd, path, on_member, &seen, cut);
    LG_ASSERT(rc == 0 || rc == LG_ERR_CORRUPT);
    LG_ASSERT(rc == LG_ERR_CORRUPT || cut->offset == UINT64_MAX);
    LG_ASSERT(cut->offset == UINT64_MAX || cut->offset == bytes);
    LG_ASSERT(strlen(cut->name) < LG_TAR_NAME_MAX);
    free(cut);
    close(fd);
    lg_err_clear();
}

/* In every block that is not all zeros: the content of members changes too, which is no loss. */
static void set_sums(uint8_t *data, size_t bytes)
{
    for (size_t at = 0; at + LG_TAR_BLOCK <= bytes; at += LG_TAR_BLOCK) {
        unsigned sum = 0;
        uint8_t *b = data + at;
        for (int i = 0; i < LG_TAR_BLOCK; i++)
            sum += i >= SUM_AT && i < SUM_AT + SUM_LEN ? ' ' : b[i];
        if (sum == SUM_LEN * ' ') continue;
        char text[16];
        snprintf(text, sizeof text, "%06o", sum);
        memcpy(b + SUM_AT, text, 7);
        b[SUM_AT + 7] = ' ';
    }
}

LG_FUZZ_TARGET(tar)
{
    struct lg_fuzz_input in = {data, bytes};
    size_t n;
    scan(data, bytes);
    uint8_t *copy = (uint8_t *)lg_fuzz_take(&in, bytes, &n);
    set_sums(copy, n);
    scan(copy, n);
    free(copy);
}
