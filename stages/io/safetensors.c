/* Reading safetensors; see safetensors.h.
 *
 * Reading maps the file privately and parses the header (safetensors_header.h), which trusts nothing:
 * every number is a whole number below 2^53 before it is used, and shape x type must give exactly the
 * bytes between the offsets. Sorted by offset the tensors must tile the data: no hole, no overlap, no
 * byte missing or left over at the end of the file. So after a successful open
 * every entry's [data, data + bytes) lies in the mapping, and nobody downstream checks again. (A
 * file that somebody shortens while it is mapped faults; published files are never changed in
 * place.) */
#include "stages/io/safetensors.h"
#include "base/fs.h"
#include "base/heartbeat.h"
#include "stages/io/safetensors_header.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PREFIX_BYTES = 8,     /* the header's length */
    READ_COUNT = 1 << 20, /* elements between two heartbeats */
};

struct lg_st_file {
    char *label; /* the path, or what the caller calls the memory */
    const char *base;
    size_t bytes;
    bool mapped;
    struct lg_st_header header; /* its entries by offset */
    int *by_name;               /* indices of entry, names ascending */
};

static int compare_offset(const void *a, const void *b)
{
    const struct lg_st_entry *x = a, *y = b;
    if (x->file_offset != y->file_offset) return x->file_offset < y->file_offset ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1; /* empty ones first */
    return strcmp(x->name, y->name);
}

static int compare_name(const void *a, const void *b, void *arg)
{
    const struct lg_st_entry *e = arg;
    return strcmp(e[*(const int *)a].name, e[*(const int *)b].name);
}

/* The tensors must tile the bytes from data_start to the end of the file. */
static int check_tiling(const lg_st_file *f, size_t data_start)
{
    size_t at = data_start;
    for (int i = 0; i < f->header.count; i++) {
        const struct lg_st_entry *e = &f->header.entry[i];
        if (e->file_offset < at)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensors \"%s\" and \"%s\" overlap", f->label,
                           f->header.entry[i - 1].name, e->name);
        if (e->file_offset > at)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: a hole of %zu bytes before tensor \"%s\"", f->label,
                           e->file_offset - at, e->name);
        at += e->bytes; /* below 2^54 + 2^27: both summands are bounded */
    }
    if (at > f->bytes)
        return LG_FAIL(
            LG_ERR_CORRUPT,
            "%s is truncated: %zu bytes are missing (it has %zu, its header describes %zu)",
            f->label, at - f->bytes, f->bytes, at);
    if (at < f->bytes)
        return LG_FAIL(LG_ERR_CORRUPT, "%s has %zu bytes after its last tensor", f->label,
                       f->bytes - at);
    return 0;
}

static int index_names(lg_st_file *f)
{
    f->by_name = calloc((size_t)f->header.count + 1, sizeof(int));
    if (!f->by_name) return LG_FAIL(LG_ERR_NOSPACE, "%s: no memory for the index", f->label);
    for (int i = 0; i < f->header.count; i++) f->by_name[i] = i;
    qsort_r(f->by_name, (size_t)f->header.count, sizeof(int), compare_name, f->header.entry);
    for (int i = 1; i < f->header.count; i++)
        if (!compare_name(&f->by_name[i - 1], &f->by_name[i], f->header.entry))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" appears twice", f->label,
                           f->header.entry[f->by_name[i]].name);
    return 0;
}

static int parse_tensors(lg_st_file *f, size_t data_start)
{
    struct lg_st_header *h = &f->header;
    if (h->count) qsort(h->entry, (size_t)h->count, sizeof *h->entry, compare_offset);
    LG_TRY(index_names(f)); /* a tensor twice is also an overlap: the better message first */
    LG_TRY(check_tiling(f, data_start));
    for (int i = 0; i < h->count; i++) h->entry[i].data = f->base + h->entry[i].file_offset;
    return 0;
}

/* A clone without Git LFS has a text of this beginning in place of each large file. */
static const char LFS_POINTER[] = "version https://git-lfs";

static int parse(lg_st_file *f)
{
    if (f->bytes < PREFIX_BYTES)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is truncated: it has %zu bytes, at least %zu are missing", f->label,
                       f->bytes, PREFIX_BYTES + 2 - f->bytes);
    if (f->bytes >= sizeof LFS_POINTER - 1 &&
        memcmp(f->base, LFS_POINTER, sizeof LFS_POINTER - 1) == 0)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is a pointer of Git LFS, not the file itself: fetch it, with `git lfs "
                       "pull` in its folder",
                       f->label);
    uint64_t header_bytes = 0;
    for (int i = 0; i < PREFIX_BYTES; i++)
        header_bytes |= (uint64_t)(unsigned char)f->base[i] << (8 * i);
    if (header_bytes > LG_ST_HEADER_BYTES_MAX || header_bytes < 2)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is no safetensors file: its header would have %llu bytes", f->label,
                       (unsigned long long)header_bytes);
    if (header_bytes > f->bytes - PREFIX_BYTES)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is truncated inside its header: at least %llu bytes are missing",
                       f->label, (unsigned long long)(header_bytes - (f->bytes - PREFIX_BYTES)));
    struct lg_st_header_source header = {.label = f->label,
                                         .json = f->base + PREFIX_BYTES,
                                         .bytes = header_bytes,
                                         .data_start = PREFIX_BYTES + header_bytes};
    LG_TRY(lg_st_header_parse(&header, &f->header));
    LG_TRY(parse_tensors(f, header.data_start));
    return 0;
}

static int map_file(lg_st_file *f, const char *path)
{
    int fd, rc = 0;
    uint64_t bytes;
    LG_TRY(lg_open_file(path, &fd, &bytes));
    if (bytes > 0) {
        void *p = mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            rc = LG_FAIL(lg_err_from_errno(errno), "cannot map %s: %s", path, strerror(errno));
        else {
            f->base = p;
            f->bytes = (size_t)bytes;
            f->mapped = true;
        }
    }
    close(fd);
    return rc;
}

static int open_any(const char *label, bool mapped, const void *data, size_t bytes,
                    lg_st_file **ret)
{
    lg_st_file *f = calloc(1, sizeof *f);
    if (f) f->label = strdup(label);
    if (!f || !f->label) {
        lg_st_close(&f);
        return LG_FAIL(LG_ERR_NOSPACE, "no memory to open %s", label);
    }
    int rc = 0;
    if (mapped)
        LG_TRY_GOTO(rc, map_file(f, label), fail);
    else
        f->base = data, f->bytes = bytes;
    LG_TRY_GOTO(rc, parse(f), fail);
    *ret = f;
    return 0;
fail:
    lg_st_close(&f);
    return rc;
}

int lg_st_open(const char *path, lg_st_file **ret)
{
    return open_any(path, true, NULL, 0, ret);
}

int lg_st_open_memory(const char *label, const void *data, size_t bytes, lg_st_file **ret)
{
    return open_any(label, false, data, bytes, ret);
}

void lg_st_close(lg_st_file **f)
{
    if (!*f) return;
    if ((*f)->mapped) munmap((void *)(uintptr_t)(*f)->base, (*f)->bytes);
    lg_st_header_free(&(*f)->header);
    free((*f)->by_name);
    free((*f)->label);
    free(*f);
    *f = NULL;
}

int lg_st_count(const lg_st_file *f)
{
    return f->header.count;
}

const struct lg_st_entry *lg_st_at(const lg_st_file *f, int i)
{
    LG_ASSERT(i >= 0 && i < f->header.count);
    return &f->header.entry[i];
}

const struct lg_st_entry *lg_st_find(const lg_st_file *f, const char *name)
{
    int low = 0, high = f->header.count;
    while (low < high) {
        int mid = low + (high - low) / 2;
        const struct lg_st_entry *e = &f->header.entry[f->by_name[mid]];
        int c = strcmp(name, e->name);
        if (!c) return e;
        if (c < 0)
            high = mid;
        else
            low = mid + 1;
    }
    return NULL;
}

const char *lg_st_metadata(const lg_st_file *f, const char *key)
{
    return lg_st_header_metadata(&f->header, key);
}

static float from_bits(uint32_t u)
{
    float v;
    memcpy(&v, &u, sizeof v);
    return v;
}

static float f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
    if (exponent == 31) return from_bits(sign | 0x7f800000u | fraction << 13);
    if (exponent) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float v = (float)fraction * 0x1p-24f; /* subnormal: exact */
    return sign ? -v : v;
}

static int read_piece(const struct lg_st_entry *e, float *dst, size_t first, size_t count)
{
    const char *src = (const char *)e->data + first * lg_dtype_bytes(e->dtype); /* any alignment */
    uint16_t h;
    double d;
    switch (e->dtype) {
    case LG_F32:
        memcpy(dst, src, count * sizeof *dst);
        return 0;
    case LG_F16:
        for (size_t i = 0; i < count; i++) memcpy(&h, src + 2 * i, 2), dst[i] = f16_to_f32(h);
        return 0;
    case LG_BF16:
        for (size_t i = 0; i < count; i++)
            memcpy(&h, src + 2 * i, 2), dst[i] = from_bits((uint32_t)h << 16);
        return 0;
    case LG_F64:
        for (size_t i = 0; i < count; i++) memcpy(&d, src + 8 * i, 8), dst[i] = (float)d;
        return 0;
    default:
        return LG_FAIL(LG_ERR_CORRUPT, "tensor \"%s\" has type %s, a floating-point type is needed",
                       e->name, lg_st_type_name(e->dtype));
    }
}

/* What is read is the file: a page that is not in memory yet comes from the disk. */
int lg_st_read_f32(const struct lg_st_entry *e, float *dst, size_t first, size_t count)
{
    size_t n = e->bytes / lg_dtype_bytes(e->dtype);
    LG_ASSERT(first <= n && count <= n - first);
    for (size_t at = 0; at < count || at == 0; at += READ_COUNT) {
        LG_TRY(read_piece(e, dst + at, first + at, LG_MIN(count - at, (size_t)READ_COUNT)));
        lg_heartbeat();
    }
    return 0;
}
