/* Reading safetensors; see safetensors.h.
 *
 * Reading maps the file privately and parses the header with cJSON. The parser trusts nothing:
 * every number of the header is a whole number below 2^53 before it is used, shape x type must give
 * exactly the bytes between the offsets, and sorted by offset the tensors must tile the data: no
 * hole, no overlap, no byte missing or left over at the end of the file. So after a successful open
 * every entry's [data, data + bytes) lies in the mapping, and nobody downstream checks again. (A
 * file that somebody shortens while it is mapped faults; published files are never changed in
 * place.) */
#include "stages/io/safetensors.h"
#include <cjson/cJSON.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    PREFIX_BYTES = 8,             /* the header's length */
    HEADER_BYTES_MAX = 100000000, /* the limit of the reference implementation */
    ENTRIES_MAX = 1 << 20,
    SHAPE_RANK_MAX = 8,
};
#define INTEGER_MAX 9007199254740992.0 /* 2^53: what a JSON number holds exactly */

static const struct {
    const char *name;
    lg_dtype dtype;
} types[] = {
    {"F32", LG_F32}, {"F64", LG_F64}, {"F16", LG_F16}, {"BF16", LG_BF16},
    {"I32", LG_I32}, {"U8", LG_U8},   {"I64", LG_I64},
};

struct lg_st_file {
    char *label; /* the path, or what the caller calls the memory */
    const char *base;
    size_t bytes;
    bool mapped;
    char *header;
    cJSON *root; /* names live here */
    int count;
    struct lg_st_entry *entry; /* by offset */
    int *by_name;              /* indices of entry, names ascending */
};

const char *lg_st_type_name(lg_dtype t)
{
    for (size_t i = 0; i < LG_ARRAY_LEN(types); i++)
        if (types[i].dtype == t) return types[i].name;
    return "?";
}

static int whole_number(const cJSON *j, uint64_t *ret)
{
    if (!cJSON_IsNumber(j) || !(j->valuedouble >= 0 && j->valuedouble < INTEGER_MAX)) return -1;
    uint64_t v = (uint64_t)j->valuedouble;
    if ((double)v != j->valuedouble) return -1;
    *ret = v;
    return 0;
}

static int parse_dtype(const lg_st_file *f, const cJSON *j, struct lg_st_entry *e)
{
    const cJSON *t = cJSON_GetObjectItemCaseSensitive(j, "dtype");
    if (!cJSON_IsString(t))
        return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" has no dtype", f->label, e->name);
    for (size_t i = 0; i < LG_ARRAY_LEN(types); i++)
        if (!strcmp(t->valuestring, types[i].name)) {
            e->dtype = types[i].dtype;
            return 0;
        }
    return LG_FAIL(
        LG_ERR_CORRUPT,
        "%s: tensor \"%s\" has dtype \"%.32s\"; F32, F64, F16, BF16, I32, I64 and U8 are "
        "supported",
        f->label, e->name, t->valuestring);
}

/* Shape and the bytes that it needs. */
static int parse_shape(const lg_st_file *f, const cJSON *j, struct lg_st_entry *e,
                       uint64_t *ret_bytes)
{
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(j, "shape");
    if (!cJSON_IsArray(shape))
        return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" has no shape", f->label, e->name);
    uint64_t bytes = lg_dtype_bytes(e->dtype);
    for (const cJSON *d = shape->child; d; d = d->next) {
        uint64_t v;
        if (e->rank == SHAPE_RANK_MAX)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" has more than %d dimensions",
                           f->label, e->name, SHAPE_RANK_MAX);
        if (whole_number(d, &v) < 0 || __builtin_mul_overflow(bytes, v, &bytes))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\": dimension %d is impossible",
                           f->label, e->name, e->rank);
        e->dim[e->rank++] = (int64_t)v;
    }
    *ret_bytes = bytes;
    return 0;
}

/* One tensor of the header. The offsets are checked against the file's size later, all together. */
static int parse_entry(const lg_st_file *f, const cJSON *j, size_t data_start,
                       struct lg_st_entry *ret)
{
    struct lg_st_entry e = {.name = j->string};
    if (!cJSON_IsObject(j))
        return LG_FAIL(LG_ERR_CORRUPT, "%s: \"%s\" in the header is not an object", f->label,
                       e.name);
    LG_TRY(parse_dtype(f, j, &e));
    uint64_t bytes = 0, begin = 0, end = 0;
    LG_TRY(parse_shape(f, j, &e, &bytes));
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(j, "data_offsets");
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        whole_number(offsets->child, &begin) < 0 || whole_number(offsets->child->next, &end) < 0 ||
        end < begin)
        return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" has no usable data_offsets", f->label,
                       e.name);
    if (end - begin != bytes)
        return LG_FAIL(
            LG_ERR_CORRUPT,
            "%s: tensor \"%s\" needs %llu bytes by its shape, its data_offsets give %llu", f->label,
            e.name, (unsigned long long)bytes, (unsigned long long)(end - begin));
    e.bytes = bytes;
    e.file_offset = data_start + begin;
    *ret = e;
    return 0;
}

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
    for (int i = 0; i < f->count; i++) {
        const struct lg_st_entry *e = &f->entry[i];
        if (e->file_offset < at)
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensors \"%s\" and \"%s\" overlap", f->label,
                           f->entry[i - 1].name, e->name);
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
    f->by_name = calloc((size_t)f->count + 1, sizeof(int));
    if (!f->by_name) return LG_FAIL(LG_ERR_NOSPACE, "%s: no memory for the index", f->label);
    for (int i = 0; i < f->count; i++) f->by_name[i] = i;
    qsort_r(f->by_name, (size_t)f->count, sizeof(int), compare_name, f->entry);
    for (int i = 1; i < f->count; i++)
        if (!compare_name(&f->by_name[i - 1], &f->by_name[i], f->entry))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: tensor \"%s\" appears twice", f->label,
                           f->entry[f->by_name[i]].name);
    return 0;
}

static int check_metadata(const lg_st_file *f, const cJSON *meta)
{
    if (!cJSON_IsObject(meta))
        return LG_FAIL(LG_ERR_CORRUPT, "%s: __metadata__ is not an object", f->label);
    for (const cJSON *m = meta->child; m; m = m->next)
        if (!cJSON_IsString(m))
            return LG_FAIL(LG_ERR_CORRUPT, "%s: __metadata__.%s is not a string", f->label,
                           m->string);
    return 0;
}

static int parse_tensors(lg_st_file *f, size_t data_start)
{
    int n = 0;
    for (const cJSON *j = f->root->child; j; j = j->next)
        if (++n > ENTRIES_MAX)
            return LG_FAIL(LG_ERR_CORRUPT, "%s has more than %d tensors", f->label, ENTRIES_MAX);
    f->entry = calloc((size_t)n + 1, sizeof *f->entry);
    if (!f->entry) return LG_FAIL(LG_ERR_NOSPACE, "%s: no memory for %d tensors", f->label, n);
    bool metadata = false;
    for (const cJSON *j = f->root->child; j; j = j->next) {
        if (strcmp(j->string, "__metadata__")) {
            LG_TRY(parse_entry(f, j, data_start, &f->entry[f->count]));
            f->count++;
            continue;
        }
        if (metadata) return LG_FAIL(LG_ERR_CORRUPT, "%s: __metadata__ appears twice", f->label);
        metadata = true;
        LG_TRY(check_metadata(f, j));
    }
    qsort(f->entry, (size_t)f->count, sizeof *f->entry, compare_offset);
    LG_TRY(index_names(f)); /* a tensor twice is also an overlap: the better message first */
    LG_TRY(check_tiling(f, data_start));
    for (int i = 0; i < f->count; i++) f->entry[i].data = f->base + f->entry[i].file_offset;
    return 0;
}

static int parse(lg_st_file *f)
{
    if (f->bytes < PREFIX_BYTES)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is truncated: it has %zu bytes, at least %zu are missing", f->label,
                       f->bytes, PREFIX_BYTES + 2 - f->bytes);
    uint64_t header_bytes = 0;
    for (int i = 0; i < PREFIX_BYTES; i++)
        header_bytes |= (uint64_t)(unsigned char)f->base[i] << (8 * i);
    if (header_bytes > HEADER_BYTES_MAX || header_bytes < 2)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is no safetensors file: its header would have %llu bytes", f->label,
                       (unsigned long long)header_bytes);
    if (header_bytes > f->bytes - PREFIX_BYTES)
        return LG_FAIL(LG_ERR_CORRUPT,
                       "%s is truncated inside its header: at least %llu bytes are missing",
                       f->label, (unsigned long long)(header_bytes - (f->bytes - PREFIX_BYTES)));
    f->header = malloc(header_bytes + 1);
    if (!f->header) return LG_FAIL(LG_ERR_NOSPACE, "%s: no memory for its header", f->label);
    memcpy(f->header, f->base + PREFIX_BYTES, header_bytes);
    f->header[header_bytes] = 0;
    const char *end = NULL;
    f->root = cJSON_ParseWithLengthOpts(f->header, header_bytes + 1, &end, false);
    if (!f->root || !cJSON_IsObject(f->root))
        return LG_FAIL(LG_ERR_CORRUPT, "%s: its header is no JSON object (at byte %td)", f->label,
                       end ? end - f->header + PREFIX_BYTES : (ptrdiff_t)PREFIX_BYTES);
    for (; end < f->header + header_bytes; end++)
        if (*end != ' ' && *end != '\n' && *end != '\r' && *end != '\t')
            return LG_FAIL(LG_ERR_CORRUPT,
                           "%s: its header goes on after the JSON object (at byte %td)", f->label,
                           end - f->header + PREFIX_BYTES);
    return parse_tensors(f, PREFIX_BYTES + header_bytes);
}

static int map_file(lg_st_file *f, const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return LG_FAIL(lg_err_from_errno(errno), "cannot open %s: %s", path, strerror(errno));
    struct stat st;
    int rc = 0;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
        rc = LG_FAIL(LG_ERR_IO, "%s is not a regular file", path);
    else if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED)
            rc = LG_FAIL(lg_err_from_errno(errno), "cannot map %s: %s", path, strerror(errno));
        else {
            f->base = p;
            f->bytes = (size_t)st.st_size;
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
    cJSON_Delete((*f)->root);
    free((*f)->header);
    free((*f)->entry);
    free((*f)->by_name);
    free((*f)->label);
    free(*f);
    *f = NULL;
}

int lg_st_count(const lg_st_file *f)
{
    return f->count;
}

const struct lg_st_entry *lg_st_at(const lg_st_file *f, int i)
{
    LG_ASSERT(i >= 0 && i < f->count);
    return &f->entry[i];
}

const struct lg_st_entry *lg_st_find(const lg_st_file *f, const char *name)
{
    int low = 0, high = f->count;
    while (low < high) {
        int mid = low + (high - low) / 2;
        const struct lg_st_entry *e = &f->entry[f->by_name[mid]];
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
    const cJSON *meta = cJSON_GetObjectItemCaseSensitive(f->root, "__metadata__");
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(meta, key));
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

int lg_st_read_f32(const struct lg_st_entry *e, float *dst, size_t first, size_t count)
{
    size_t width = lg_dtype_bytes(e->dtype), n = e->bytes / width;
    LG_ASSERT(first <= n && count <= n - first);
    const char *src = (const char *)e->data + first * width; /* need not be aligned */
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
