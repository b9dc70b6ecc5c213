/* safetensors: what is written is read back; every way in which a small file can be cut or its
 * header be wrong is refused with a message that names the fault. */
#include "base/fs.h"
#include "stages/io/safetensors.h"
#include "tests/unit/scratch.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

static char dir[SCRATCH_BYTES];

static int make_dir(void **state)
{
    (void)state;
    scratch_folder(dir);
    return 0;
}

static int drop_dir(void **state)
{
    (void)state;
    return lg_remove_tree(dir);
}

/* A file from header text and data bytes, in memory. */
struct blob {
    char bytes[4096];
    size_t n;
};

static struct blob blob(const char *header, size_t data_bytes)
{
    struct blob b = {.n = 8 + strlen(header) + data_bytes};
    assert_true(b.n <= sizeof b.bytes);
    size_t length = strlen(header);
    for (int i = 0; i < 8; i++) b.bytes[i] = (char)(length >> (8 * i));
    memcpy(b.bytes + 8, header, length);
    return b;
}

/* Opening must fail as corrupt, with `needle` in the message. */
static void refused(const struct blob *b, const char *needle)
{
    lg_st_file *f = NULL;
    int rc = lg_st_open_memory("blob", b->bytes, b->n, &f);
    if (rc != LG_ERR_CORRUPT || !strstr(lg_err_message(), needle))
        fail_msg("rc %d, \"%s\" lacks \"%s\"", rc, rc ? lg_err_message() : "opened", needle);
    assert_null(f);
    lg_err_clear();
}

static void refused_header(const char *header, size_t data_bytes, const char *needle)
{
    struct blob b = blob(header, data_bytes);
    refused(&b, needle);
}

static void test_round_trip(void **state)
{
    (void)state;
    char path[LG_PATH_BYTES];
    assert_int_equal(lg_path(path, "%s/a.safetensors", dir), 0);
    float a[6] = {1, -2, 3.5f, 0, 1e-30f, 7};
    int32_t b[3] = {1, -2, 1 << 30};
    uint8_t c[5] = {0, 1, 2, 254, 255};
    lg_st_writer *w = NULL;
    assert_int_equal(lg_st_writer_open(path, &w), 0);
    assert_int_equal(lg_st_writer_metadata(w, "captions", "[\"a \\ \xc3\xa9\"]\n"), 0);
    assert_int_equal(lg_st_writer_declare(w, "c", LG_U8, 1, (int64_t[]){5}), 0);
    assert_int_equal(lg_st_writer_declare(w, "a \"quoted\"", LG_F32, 2, (int64_t[]){2, 3}), 0);
    assert_int_equal(lg_st_writer_declare(w, "empty", LG_F32, 2, (int64_t[]){0, 3}), 0);
    assert_int_equal(lg_st_writer_declare(w, "b", LG_I32, 3, (int64_t[]){1, 3, 1}), 0);
    assert_int_equal(lg_st_writer_declare(w, "scalar", LG_F32, 0, NULL), 0);
    assert_int_equal(lg_st_writer_data(w, c, 2), 0);
    assert_int_equal(lg_st_writer_data(w, c + 2, 3), 0);
    assert_int_equal(lg_st_writer_data(w, a, sizeof a), 0);
    assert_int_equal(lg_st_writer_data(w, b, sizeof b), 0);
    assert_false(lg_path_exists(path)); /* not before it is complete */
    assert_int_equal(lg_st_writer_data(w, a + 2, 4), 0);
    uint64_t hash = 0, file_hash = 1, bytes;
    assert_int_equal(lg_st_writer_finish(&w, &hash), 0);
    assert_null(w);
    assert_int_equal(lg_hash_file(path, &file_hash, &bytes), 0);
    assert_true(hash == file_hash);

    lg_st_file *f = NULL;
    assert_int_equal(lg_st_open(path, &f), 0);
    assert_int_equal(lg_st_count(f), 5);
    assert_string_equal(lg_st_at(f, 0)->name, "c");
    assert_int_equal(lg_st_at(f, 0)->file_offset % 8, 0);
    const struct lg_st_entry *e = lg_st_find(f, "a \"quoted\"");
    assert_non_null(e);
    assert_int_equal(e->rank, 2);
    assert_int_equal(e->dim[1], 3);
    assert_memory_equal(e->data, a, sizeof a);
    float part[2];
    assert_int_equal(lg_st_read_f32(e, part, 2, 2), 0);
    assert_memory_equal(part, a + 2, sizeof part);
    assert_memory_equal(lg_st_find(f, "b")->data, b, sizeof b);
    assert_int_equal(lg_st_find(f, "scalar")->rank, 0);
    assert_int_equal(lg_st_find(f, "empty")->bytes, 0);
    assert_null(lg_st_find(f, "d"));
    assert_null(lg_st_find(f, "__metadata__"));
    assert_string_equal(lg_st_metadata(f, "captions"), "[\"a \\ \xc3\xa9\"]\n");
    assert_null(lg_st_metadata(f, "none"));
    assert_int_equal(lg_st_read_f32(lg_st_find(f, "c"), part, 0, 1), LG_ERR_CORRUPT);
    lg_err_clear();
    lg_st_close(&f);
    assert_null(f);
}

static void test_large_and_memory(void **state)
{
    (void)state;
    enum { N = 700001 }; /* several buffers, an odd end */
    float *x = malloc(N * sizeof *x);
    for (int i = 0; i < N; i++) x[i] = (float)i;
    char path[LG_PATH_BYTES], *file = NULL;
    assert_int_equal(lg_path(path, "%s/big", dir), 0);
    lg_st_writer *w[2] = {NULL, NULL};
    assert_int_equal(lg_st_writer_open(path, &w[0]), 0);
    assert_int_equal(lg_st_writer_open_memory(&w[1]), 0);
    for (int k = 0; k < 2; k++) {
        assert_int_equal(lg_st_writer_declare(w[k], "x", LG_F32, 1, (int64_t[]){N}), 0);
        for (int at = 0, n; at < N; at += n) {
            n = LG_MIN(N - at, at < 1000 ? 7 : 123457);
            assert_int_equal(lg_st_writer_data(w[k], x + at, (size_t)n * 4), 0);
        }
        if (k == 0) assert_int_equal(lg_st_writer_data(w[k], x, 0), 0);
    }
    void *memory = NULL;
    size_t memory_bytes = 0, file_bytes = 0;
    assert_int_equal(lg_st_writer_finish(&w[0], NULL), 0);
    assert_int_equal(lg_st_writer_finish_memory(&w[1], &memory, &memory_bytes), 0);
    assert_int_equal(lg_read_file(path, 1 << 30, &file, &file_bytes), 0);
    assert_int_equal(file_bytes, memory_bytes);
    assert_memory_equal(file, memory, file_bytes);
    lg_st_file *f = NULL;
    assert_int_equal(lg_st_open_memory("m", memory, memory_bytes, &f), 0);
    assert_memory_equal(lg_st_find(f, "x")->data, x, N * sizeof *x);
    lg_st_close(&f);
    free(file);
    free(memory);
    free(x);
}

static void test_abort_leaves_nothing(void **state)
{
    (void)state;
    char path[LG_PATH_BYTES];
    assert_int_equal(lg_path(path, "%s/sub/x", dir), 0);
    lg_st_writer *w = NULL;
    assert_int_equal(lg_st_writer_open(path, &w), LG_ERR_NOTFOUND);
    lg_err_clear();
    char sub[LG_PATH_BYTES];
    assert_int_equal(lg_path(sub, "%s/sub", dir), 0);
    assert_int_equal(lg_mkdirs(sub), 0);
    assert_int_equal(lg_st_writer_open(path, &w), 0);
    assert_int_equal(lg_st_writer_declare(w, "x", LG_U8, 1, (int64_t[]){3}), 0);
    lg_st_writer_abort(&w);
    lg_st_writer_abort(&w);
    assert_int_equal(rmdir(sub), 0); /* empty */
}

static void test_conversions(void **state)
{
    (void)state;
    struct blob b = blob("{\"h\":{\"dtype\":\"F16\",\"shape\":[9],\"data_offsets\":[0,18]},"
                         "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[18,24]},"
                         "\"d\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[24,32]}}",
                         32);
    /* 1, -2, smallest and largest subnormal, smallest normal, 65504, inf, -0, 1/3 */
    uint16_t h[9] = {0x3c00, 0xc000, 0x0001, 0x03ff, 0x0400, 0x7bff, 0x7c00, 0x8000, 0x3555};
    uint16_t bf[3] = {0x3f80, 0xc049, 0x7f80};
    double d = -1.0 / 3;
    memcpy(b.bytes + b.n - 32, h, 18);
    memcpy(b.bytes + b.n - 14, bf, 6);
    memcpy(b.bytes + b.n - 8, &d, 8);
    lg_st_file *f = NULL;
    assert_int_equal(lg_st_open_memory("blob", b.bytes, b.n, &f), 0);
    float x[9],
        want[9] = {1, -2, 0x1p-24f, 0x1.ff8p-15f, 0x1p-14f, 65504, INFINITY, -0.f, 0x1.554p-2f};
    assert_int_equal(lg_st_read_f32(lg_st_find(f, "h"), x, 0, 9), 0);
    assert_memory_equal(x, want, sizeof want);
    float want_bf[3] = {1, -3.140625f, INFINITY};
    assert_int_equal(lg_st_read_f32(lg_st_find(f, "b"), x, 0, 3), 0);
    assert_memory_equal(x, want_bf, sizeof want_bf);
    assert_int_equal(lg_st_read_f32(lg_st_find(f, "d"), x, 0, 1), 0);
    assert_true(x[0] == (float)d);
    b.bytes[b.n - 31] = 0x7e, b.bytes[b.n - 32] = 1; /* NaN stays NaN */
    assert_int_equal(lg_st_read_f32(lg_st_find(f, "h"), x, 0, 1), 0);
    assert_true(isnan(x[0]));
    lg_st_close(&f);
}

#define TWO_TENSORS                                                                                \
    "{\"__metadata__\":{\"k\":\"v\"},\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,"  \
    "8]},"                                                                                         \
    "\"b\":{\"dtype\":\"U8\",\"shape\":[3,1],\"data_offsets\":[8,11]}}"

/* Cut after every byte: always refused, and the message counts what is missing. */
static void test_truncations(void **state)
{
    (void)state;
    struct blob whole = blob(TWO_TENSORS, 11);
    lg_st_file *f = NULL;
    assert_int_equal(lg_st_open_memory("blob", whole.bytes, whole.n, &f), 0);
    lg_st_close(&f);
    size_t header_end = whole.n - 11;
    for (size_t n = 0; n < whole.n; n++) {
        char *exact = malloc(n + 1), needle[64]; /* on the heap: a sanitizer sees a read past n */
        memcpy(exact, whole.bytes, n);
        snprintf(needle, sizeof needle, "%zu %s missing",
                 n < 8 ? 10 - n : (n < header_end ? header_end : whole.n) - n,
                 n < 8 ? "are" : "bytes are");
        int rc = lg_st_open_memory("blob", exact, n, &f);
        if (rc != LG_ERR_CORRUPT || !strstr(lg_err_message(), needle))
            fail_msg("cut at %zu: rc %d, %s", n, rc, lg_err_message());
        free(exact);
    }
    whole.n++;
    refused(&whole, "1 bytes after its last tensor");
}

/* Every byte of the header replaced by hostile ones: opened or refused, never a crash, and what
 * opens stays inside the file. */
static void test_flipped_bytes(void **state)
{
    (void)state;
    const char values[] = {0, '"', '9', '}', '-', 'e', (char)0xff, ' ', '\\'};
    struct blob whole = blob(TWO_TENSORS, 11);
    int opened = 0;
    for (size_t i = 0; i < whole.n - 11; i++)
        for (size_t k = 0; k < sizeof values; k++) {
            struct blob b = whole;
            b.bytes[i] = values[k];
            lg_st_file *f = NULL;
            int rc = lg_st_open_memory("blob", b.bytes, b.n, &f);
            if (rc == 0) {
                opened++;
                for (int t = 0; t < lg_st_count(f); t++) {
                    const struct lg_st_entry *e = lg_st_at(f, t);
                    assert_true(e->file_offset <= b.n && e->bytes <= b.n - e->file_offset);
                }
                lg_st_close(&f);
            } else
                assert_int_equal(rc, LG_ERR_CORRUPT);
        }
    lg_err_clear();
    assert_true(opened > 0); /* a changed name is still a file */
}

static void test_bad_headers(void **state)
{
    (void)state;
#define T(name, dtype, shape, offsets)                                                             \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"
    refused_header("[]", 0, "no JSON object");
    refused_header("{\"a\":1}", 0, "not an object");
    refused_header("{} x", 0, "goes on after");
    refused_header("{" T("a", "F32", "[2]", "[0,8]") "," T("b", "F32", "[1]", "[4,8]") "}", 8,
                   "overlap");
    refused_header("{" T("a", "F32", "[1]", "[0,4]") "," T("b", "F32", "[1]", "[8,12]") "}", 12,
                   "hole of 4 bytes before tensor \"b\"");
    refused_header("{" T("a", "F32", "[1]", "[4,8]") "}", 8, "hole of 4 bytes");
    refused_header("{" T("a", "F32", "[1]", "[0,4]") "," T("a", "F32", "[1]", "[0,4]") "}", 4,
                   "\"a\" appears twice");
    refused_header("{" T("a", "F32", "[2]", "[0,4]") "}", 4, "needs 8 bytes");
    refused_header("{" T("a", "F32", "[-1]", "[0,4]") "}", 4, "dimension 0 is impossible");
    refused_header("{" T("a", "F32", "[1.5]", "[0,4]") "}", 4, "dimension 0 is impossible");
    refused_header("{" T("a", "F32", "[1e300]", "[0,4]") "}", 4, "dimension 0 is impossible");
    refused_header("{" T("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0,
                   "dimension 1 is impossible");
    refused_header("{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]") "}", 4, "more than 8");
    refused_header("{" T("a", "F32", "3", "[0,4]") "}", 4, "no shape");
    refused_header("{" T("a", "F33", "[1]", "[0,4]") "}", 4, "dtype \"F33\"");
    refused_header("{" T("a", "F32", "[1]", "[4,0]") "}", 4, "data_offsets");
    refused_header("{" T("a", "F32", "[1]", "[0]") "}", 4, "data_offsets");
    refused_header("{" T("a", "F32", "[1]", "[0,4,8]") "}", 4, "data_offsets");
    refused_header("{" T("a", "F32", "[1]", "[-4,0]") "}", 4, "data_offsets");
    refused_header("{" T("a", "F32", "[1]", "[0,18446744073709551616]") "}", 4, "data_offsets");
    refused_header("{\"__metadata__\":{\"a\":1}}", 0, "not a string");
    refused_header("{\"__metadata__\":[]}", 0, "not an object");
    refused_header("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "twice");
    struct blob b = blob("{}", 0);
    b.bytes[6] = 1;
    refused(&b, "no safetensors file");
    strcpy(b.bytes, "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 9\n");
    b.n = strlen(b.bytes);
    refused(&b, "a pointer of Git LFS");
    char deep[3000]; /* nesting must not overflow the stack */
    memset(deep, '[', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    refused_header(deep, 0, "no JSON object");
    refused_header("{" T("a", "F32", "[1]", "[0,4],\"shape\":[1]") "}", 4, "says something twice");
    refused_header("{" T("a\\u0000b", "F32", "[1]", "[0,4]") "}", 4, "a NUL");
    refused_header("{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "a appears twice");
}

/* Headers of 16 MB that go on and on: refused at once, without memory for what they say. (As trees of
 * cJSON the first three took 500 MB and more.) */
static void test_endless_headers(void **state)
{
    (void)state;
    enum { HEADER = 16 << 20 };
    static const struct {
        const char *begin, *more, *why;
    } cases[] = {
        {"{\"a\":[", "0,", "not an object"},
        {"{\"a\":{\"x\":[", "0,", "more values"},
        {"{\"__metadata__\":{\"a\":[", "0,", "not a string"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[", "1,", "more than 8 dimensions"},
        {"{\"a\":{\"data_offsets\":[", "1,", "data_offsets"},
        {"{\"a\":", "{\"a\":", "more than 64 deep"},
        {"{\"a\":{", "\"a\":{},", "more values"},
        {"{\"__metadata__\":{\"a\":\"a\"", ",\"a\":\"a\"", "more values"},
    };
    char *file = malloc(8 + HEADER);
    struct rusage before, after;
    for (int i = 0; i < 8; i++) file[i] = (char)((size_t)HEADER >> (8 * i));
    for (size_t k = 0; k < LG_ARRAY_LEN(cases); k++) {
        size_t at = strlen(cases[k].begin), n = strlen(cases[k].more);
        memset(file + 8, ' ', HEADER);
        memcpy(file + 8, cases[k].begin, at);
        for (; at + n <= HEADER; at += n) memcpy(file + 8 + at, cases[k].more, n);
        lg_st_file *f = NULL;
        getrusage(RUSAGE_SELF, &before);
        assert_int_equal(lg_st_open_memory("long", file, 8 + HEADER, &f), LG_ERR_CORRUPT);
        getrusage(RUSAGE_SELF, &after);
        if (!strstr(lg_err_message(), cases[k].why))
            fail_msg("%s, not %s", lg_err_message(), cases[k].why);
        if (after.ru_maxrss - before.ru_maxrss > 8 << 10)
            fail_msg("%s: took %ld kB", cases[k].begin, after.ru_maxrss - before.ru_maxrss);
        lg_err_clear();
    }
    free(file);
}

static void test_missing_file(void **state)
{
    (void)state;
    lg_st_file *f = NULL;
    assert_int_equal(lg_st_open("/nonexistent/x.safetensors", &f), LG_ERR_NOTFOUND);
    assert_int_equal(lg_st_open("/tmp", &f), LG_ERR_IO);
    char path[LG_PATH_BYTES], *data = NULL;
    uint64_t hash, size;
    size_t bytes;
    assert_int_equal(lg_path(path, "%s/fifo", dir), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(10); /* nobody ever writes into it */
    assert_int_equal(lg_st_open(path, &f), LG_ERR_IO);
    assert_int_equal(lg_read_file(path, 100, &data, &bytes), LG_ERR_IO);
    assert_int_equal(lg_hash_file(path, &hash, &size), LG_ERR_IO);
    assert_int_equal(lg_hash_file("/dev/zero", &hash, &size), LG_ERR_IO);
    alarm(0);
    lg_err_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),           cmocka_unit_test(test_large_and_memory),
        cmocka_unit_test(test_abort_leaves_nothing), cmocka_unit_test(test_conversions),
        cmocka_unit_test(test_truncations),          cmocka_unit_test(test_flipped_bytes),
        cmocka_unit_test(test_bad_headers),          cmocka_unit_test(test_missing_file),
        cmocka_unit_test(test_endless_headers),
    };
    return cmocka_run_group_tests(tests, make_dir, drop_dir);
}
