/* Tar: what tar(1) packs in each format is found where it lies; archives cut at every block are
 * noticed and their complete members reported; damaged ones are refused; writing is repeatable. */
#include "base/fs.h"
#include "stages/io/tar.h"
#include "tests/unit/scratch.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

enum { FOUND_MAX = 16 };

struct found {
    int n;
    char name[FOUND_MAX][LG_TAR_NAME_MAX];
    uint64_t offset[FOUND_MAX], size[FOUND_MAX];
};

static int note(void *ctx, const struct lg_tar_member *m)
{
    struct found *f = ctx;
    assert_true(f->n < FOUND_MAX);
    strcpy(f->name[f->n], m->name);
    f->offset[f->n] = m->offset;
    f->size[f->n++] = m->size;
    return 0;
}

static int scan(const char *path, struct found *f, struct lg_tar_cut *cut)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    f->n = 0;
    int rc = lg_tar_scan(fd, path, note, f, cut);
    close(fd);
    return rc;
}

static void shell(const char *command)
{
    if (system(command) != 0) fail_msg("failed: %s", command);
}

/* The content of member i, as text. */
static const char *content(const char *path, const struct found *f, int i)
{
    static char text[64];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    assert_true(f->size[i] < sizeof text);
    assert_int_equal(pread(fd, text, f->size[i], (off_t)f->offset[i]), f->size[i]);
    text[f->size[i]] = 0;
    close(fd);
    return text;
}

static void test_formats(void **state)
{
    (void)state;
    static const char *const formats[] = {"v7", "ustar", "gnu", "pax", "oldgnu"};
    static struct found f;
    char long_name[260] = "", command[4096];
    /* 60 characters, three folders: 183 in all, beyond the 100 of a plain header */
    for (int d = 0; d < 3; d++) {
        for (int i = 0; i < 60; i++) strcat(long_name, d == 0 ? "a" : d == 1 ? "b" : "c");
        if (d < 2) strcat(long_name, "/");
    }
    for (size_t i = 0; i < LG_ARRAY_LEN(formats); i++) {
        bool has_long = strcmp(formats[i], "v7") != 0;
        char folder[64], member[512];
        snprintf(folder, sizeof folder, "%s/in", formats[i]);
        snprintf(member, sizeof member, "%s/s/0001.txt", folder);
        scratch_write(member, "one");
        snprintf(member, sizeof member, "%s/s/0002.txt", folder);
        scratch_write(member, "");
        if (has_long) {
            snprintf(member, sizeof member, "%s/%s", folder, long_name);
            scratch_write(member, "far away");
        }
        const char *tar = scratch_path(formats[i]);
        snprintf(
            command, sizeof command,
            "cd %s && ln -s 0001.txt in/s/link.txt && tar --format=%s --sort=name -cf x.tar -C "
            "in . ",
            tar, formats[i]);
        shell(command);
        snprintf(member, sizeof member, "%s/x.tar", formats[i]);
        const char *path = scratch_path(member);
        if (scan(path, &f, NULL) < 0) fail_msg("%s: %s", formats[i], lg_err_text());
        assert_int_equal(f.n, 2 + has_long);
        int at = 0;
        if (has_long) {
            assert_string_equal(f.name[at] + 2, long_name);
            assert_string_equal(content(path, &f, at++), "far away");
        }
        assert_string_equal(f.name[at], "./s/0001.txt");
        assert_string_equal(content(path, &f, at++), "one");
        assert_string_equal(f.name[at], "./s/0002.txt");
        assert_int_equal(f.size[at], 0);
    }
}

/* Two members of 700 and 5 bytes; returns the path. */
static const char *small_tar(const char *name)
{
    lg_tar_writer *w;
    static char data[700];
    memset(data, 'x', sizeof data);
    const char *path = scratch_path(name);
    assert_int_equal(lg_tar_writer_open(path, &w), 0);
    assert_int_equal(lg_tar_writer_add(w, "a.png", data, sizeof data), 0);
    assert_false(lg_path_exists(path)); /* not before it is complete */
    assert_int_equal(lg_tar_writer_add(w, "b.txt", "hello", 5), 0);
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    assert_null(w);
    return path;
}

static void test_write_and_read(void **state)
{
    (void)state;
    static struct found f;
    char command[LG_PATH_BYTES], *a, *b;
    size_t bytes_a, bytes_b;
    const char *one = small_tar("one.tar"), *two = small_tar("two.tar");
    assert_int_equal(scan(one, &f, NULL), 0);
    assert_int_equal(f.n, 2);
    assert_int_equal(f.offset[0], 512);
    assert_int_equal(f.size[0], 700);
    assert_string_equal(content(one, &f, 1), "hello");
    /* tar(1) agrees, and equal calls give equal bytes. */
    snprintf(command, sizeof command, "test \"$(tar xOf %s b.txt)\" = hello", one);
    shell(command);
    assert_int_equal(lg_read_file(one, 1 << 20, &a, &bytes_a), 0);
    assert_int_equal(lg_read_file(two, 1 << 20, &b, &bytes_b), 0);
    assert_int_equal(bytes_a, bytes_b);
    assert_memory_equal(a, b, bytes_a);
    assert_string_equal(a + 136, "00000000000"); /* no time in it */
    free(a);
    free(b);
}

static void test_long_names_written(void **state)
{
    (void)state;
    static struct found f;
    lg_tar_writer *w;
    char name[240];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    name[150] = '/';
    const char *path = scratch_path("long.tar");
    assert_int_equal(lg_tar_writer_open(path, &w), 0);
    assert_int_equal(lg_tar_writer_add(w, name, "x", 1), 0);
    name[150] = 'n';
    assert_int_equal(lg_tar_writer_add(w, name, "x", 1), LG_ERR_USAGE);
    name[150] = '/';
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    assert_int_equal(scan(path, &f, NULL), 0);
    assert_string_equal(f.name[0], name);
    lg_err_clear();
}

/* a.png takes bytes 0..1536, b.txt ..2560, the end mark ..3584. */
static void test_cut_everywhere(void **state)
{
    (void)state;
    static struct found f;
    static struct lg_tar_cut cut;
    char *whole;
    size_t bytes;
    assert_int_equal(lg_read_file(small_tar("whole.tar"), 1 << 20, &whole, &bytes), 0);
    assert_int_equal(bytes, 3584);
    for (size_t at = 0; at < bytes; at += 64) {
        const char *path = scratch_path("cut.tar");
        assert_int_equal(lg_publish_file(path, whole, at), 0);
        cut.offset = UINT64_MAX;
        int rc = scan(path, &f, &cut);
        if (at >= 2560 + 512) { /* one zero block is enough */
            assert_int_equal(rc, 0);
            continue;
        }
        char where[32];
        snprintf(where, sizeof where, "byte %zu", at);
        assert_int_equal(rc, LG_ERR_CORRUPT);
        assert_non_null(strstr(lg_err_message(), "cut.tar is cut short"));
        assert_non_null(strstr(lg_err_message(), where));
        assert_int_equal(cut.offset, at);
        assert_int_equal(f.n, (at >= 512 + 700) + (at >= 1536 + 512 + 5));
        const char *name = at >= 512 && at < 512 + 700         ? "a.png"
                           : at >= 2048 && at < 1536 + 512 + 5 ? "b.txt"
                                                               : "";
        assert_string_equal(cut.name, name);
        lg_err_clear();
    }
    free(whole);
}

static void test_damaged(void **state)
{
    (void)state;
    static struct found f;
    static struct lg_tar_cut cut;
    char *whole;
    size_t bytes;
    assert_int_equal(lg_read_file(small_tar("good.tar"), 1 << 20, &whole, &bytes), 0);
    const char *path = scratch_path("bad.tar");
    whole[1536 + 3] ^= 1; /* in the second header's name: the checksum fails */
    assert_int_equal(lg_publish_file(path, whole, bytes), 0);
    cut.offset = UINT64_MAX;
    assert_int_equal(scan(path, &f, &cut), LG_ERR_CORRUPT);
    assert_non_null(strstr(lg_err_message(), "byte 1536"));
    assert_int_equal(cut.offset, UINT64_MAX); /* damaged, not cut */
    lg_err_clear();
    memset(whole, 'z', bytes); /* no tar at all */
    assert_int_equal(lg_publish_file(path, whole, bytes), 0);
    assert_int_equal(scan(path, &f, NULL), LG_ERR_CORRUPT);
    lg_err_clear();
    free(whole);
}

/* Any byte of the headers changed, with the checksum made good again: no crash, no wild offset. */
static void test_hostile_headers(void **state)
{
    (void)state;
    static struct found f;
    char *whole;
    size_t bytes;
    assert_int_equal(lg_read_file(small_tar("h.tar"), 1 << 20, &whole, &bytes), 0);
    static const char types[] = "0gxLK57S";
    for (size_t t = 0; types[t]; t++)
        for (int at = 124; at < 136; at++)
            for (int v = 0; v < 256; v += 51) {
                char copy[512];
                memcpy(copy, whole, 512);
                whole[156] = types[t];
                whole[at] = (char)v;
                memset(whole + 148, ' ', 8);
                unsigned sum = 0;
                for (int i = 0; i < 512; i++) sum += (uint8_t)whole[i];
                snprintf(whole + 148, 8, "%06o", sum);
                const char *path = scratch_path("hostile.tar");
                FILE *out = fopen(path, "w");
                assert_int_equal(fwrite(whole, 1, bytes, out), bytes);
                fclose(out);
                int rc = scan(path, &f, NULL);
                assert_true(rc == 0 || rc == LG_ERR_CORRUPT);
                for (int i = 0; i < f.n; i++)
                    assert_true(f.size[i] <= bytes && f.offset[i] <= bytes - f.size[i]);
                memcpy(whole, copy, 512);
            }
    lg_err_clear();
    free(whole);
}

static void test_joined(void **state)
{
    (void)state;
    static struct found f;
    char command[LG_PATH_BYTES];
    snprintf(command, sizeof command, "cat %s %s > %s", small_tar("1.tar"), small_tar("2.tar"),
             scratch_path("joined.tar"));
    shell(command);
    assert_int_equal(scan(scratch_path("joined.tar"), &f, NULL), 0);
    assert_int_equal(f.n, 4);
    assert_string_equal(content(scratch_path("joined.tar"), &f, 3), "hello");
}

static void test_abort_leaves_nothing(void **state)
{
    (void)state;
    lg_tar_writer *w;
    assert_int_equal(lg_mkdirs(scratch_path("empty")), 0);
    assert_int_equal(lg_tar_writer_open(scratch_path("empty/x.tar"), &w), 0);
    assert_int_equal(lg_tar_writer_add(w, "a", "b", 1), 0);
    lg_tar_writer_abort(&w);
    assert_null(w);
    assert_int_equal(rmdir(scratch_path("empty")), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_formats),        cmocka_unit_test(test_write_and_read),
        cmocka_unit_test(test_cut_everywhere), cmocka_unit_test(test_long_names_written),
        cmocka_unit_test(test_damaged),        cmocka_unit_test(test_hostile_headers),
        cmocka_unit_test(test_joined),         cmocka_unit_test(test_abort_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
