/* The source: shards, lists, patterns and folders are indexed in a stable order; captions and
 * labels are read from every form; unusable items are void and unreadable files are not. What
 * becomes of an item: test_samples. */
#include "base/fs.h"
#include "base/log.h"
#include "stages/io/picture.h"
#include "tests/unit/scratch.h"
#include "tests/unit/source_fixture.h"
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
// clang-format off
#include <setjmp.h>
#include <cmocka.h>
// clang-format on

/* All captions of all items in order, joined: "caption 0|caption 1|". */
static const char *captions_of(lg_source *s)
{
    static char all[4096];
    lg_item item = {0};
    all[0] = 0;
    for (uint64_t i = 0; i < lg_source_count(s); i++) {
        assert_int_equal(lg_source_read(s, i, &item), 0);
        for (int c = 0; c < item.n_captions; c++) {
            strcat(all, item.caption[c]);
            strcat(all, "|");
        }
    }
    lg_item_free(&item);
    return all;
}

/* ---- finding ---- */

static void expect_captions(const char *path, const char *want)
{
    lg_source *s = open_source(path);
    assert_string_equal(captions_of(s), want);
    lg_source_close(&s);
    assert_null(s);
}

static void test_places(void **state)
{
    (void)state;
    char path[3 * LG_PATH_BYTES], all[] = "caption 0|caption 1|caption 2|caption 3|";
    lg_mkdirs(scratch_path("d"));
    make_shard("d/s-10.tar", 3, 1); /* written out of order on purpose */
    make_shard("d/s-08.tar", 0, 1);
    make_shard("d/s-09.tar", 1, 2);
    scratch_write("d/readme.txt", "not a sample");
    expect_captions(scratch_path("d"), all);
    expect_captions(scratch_path("d/s-09.tar"), "caption 1|caption 2|");
    expect_captions(scratch_path("d/s-*.tar"), all);
    expect_captions(scratch_path("d/s-0[89].tar"), "caption 0|caption 1|caption 2|");
    expect_captions(scratch_path("d/s-{08..10}.tar"), all);
    expect_captions(scratch_path("d/s-{10,08}.tar"), "caption 0|caption 3|");
    snprintf(path, sizeof path, "%s, %s,%s", scratch_path("d/s-10.tar"), scratch_path("d/s-08.tar"),
             scratch_path("d/s-1?.tar"));
    expect_captions(path, "caption 0|caption 3|"); /* sorted, none twice */
    make_shard("d/a,b{1..2}.tar", 7, 1);
    expect_captions(scratch_path("d/a,b{1..2}.tar"), "caption 7|"); /* a name that exists */
}

static void expect_no_open(const char *path, const struct lg_source_options *o, int code,
                           const char *needle)
{
    lg_source *s = NULL;
    int rc = lg_source_open(path, o, &s);
    if (rc != code || !strstr(lg_err_message(), needle))
        fail_msg("%s: %d, \"%s\" lacks \"%s\"", path, rc, lg_err_message(), needle);
    assert_null(s);
    lg_err_clear();
}

static void test_missing_and_empty(void **state)
{
    (void)state;
    struct lg_source_options text = {.need_caption = true}, label = {.need_label = true};
    expect_no_open("", NULL, LG_ERR_CONFIG, "data.path is empty");
    expect_no_open(scratch_path("none.tar"), NULL, LG_ERR_CONFIG, "none.tar");
    expect_no_open(scratch_path("x-{0..3}.tar"), NULL, LG_ERR_CONFIG, "x-0.tar");
    expect_no_open(scratch_path("x-*.tar"), NULL, LG_ERR_CONFIG, "x-*.tar");
    lg_mkdirs(scratch_path("empty"));
    expect_no_open(scratch_path("empty"), NULL, LG_ERR_CONFIG, "no picture in");
    scratch_write("empty/only.txt", "words");
    expect_no_open(scratch_path("empty"), NULL, LG_ERR_CONFIG, ".png, .jpg");
    lg_tar_writer *w = tar_open("nothing.tar");
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    expect_no_open(scratch_path("nothing.tar"), NULL, LG_ERR_CONFIG, "no picture in");
    scratch_write("fake.tar", "this is text of less than a block");
    expect_no_open(scratch_path("fake.tar"), NULL, LG_ERR_CORRUPT, "fake.tar");
    w = tar_open("bare.tar");
    put_png(w, "1.png", 1);
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    expect_no_open(scratch_path("bare.tar"), &text, LG_ERR_CONFIG, "no caption in");
    expect_no_open(scratch_path("bare.tar"), &label, LG_ERR_CONFIG, "no class label in");
}

static void test_folder(void **state)
{
    (void)state;
    write_png("f/b.png", 1);
    scratch_write("f/b.txt", "bee");
    write_png("f/sub/a.v2.PNG", 2);
    scratch_write("f/sub/a.v2.json", "{\"captions\": [\"one\", \"two\"], \"width\": 12}");
    write_png("f/a.png", 3);
    scratch_write("f/a.txt", "ay");
    scratch_write("f/a.cls", "17\n");
    write_png("f/.hidden.png", 4);
    scratch_write("f/README.txt", "about these pictures");
    scratch_write("f/b.xmp", "ignored");
    lg_source *s = open_source(scratch_path("f"));
    assert_string_equal(captions_of(s), "ay|bee|one|two|");
    assert_int_equal(lg_source_count(s), 3);
    lg_item item = {0};
    assert_int_equal(lg_source_read(s, 0, &item), 0);
    assert_string_equal(item.key, "a");
    assert_int_equal(item.label, 17);
    assert_int_equal(lg_source_read(s, 2, &item), 0);
    assert_string_equal(item.key, "sub/a.v2");
    assert_int_equal(item.label, -1);
    lg_item_free(&item);
    lg_source_close(&s);
}

/* Captions in one file for a folder: Hugging Face's ImageFolder. */
static void test_lines(void **state)
{
    (void)state;
    struct lg_source_options text = {.need_caption = true};
    write_png("f/a.png", 1);
    write_png("f/b.png", 2);
    write_png("f/sub/c.png", 3);
    write_png("f/sub/deep/d.png", 4);
    write_png("f/e.png", 5);
    write_png("f/g.png", 6);
    scratch_write("f/b.txt", "bee's own");
    scratch_write(
        "f/metadata.jsonl",
        "\xef\xbb\xbf{\"file_name\": \"a.png\", \"text\": \"ay \\u00e9\", \"n\": [1, {}]}\r\n"
        "\n"
        "{\"text\": \"bee\", \"file_name\": \"b.png\"}\n"
        "{\"file_name\": \"./sub/c.png\", \"text\": \"no\", \"caption\": \"sea\"}\n"
        "{\"file_name\": \"gone.png\", \"text\": \"nobody's\"}\n"
        "{\"name\": \"no picture's\"}\n"
        "{\"file_name\": \"e.png\", \"text\": 3}");
    scratch_write("f/sub/deep/metadata.jsonl",
                  "{\"file_name\": \"d.png\", \"captions\": [\"dee\", \"Dee\"]}\n");
    lg_source *s = NULL;
    assert_int_equal(lg_source_open(scratch_path("f"), &text, &s), 0);
    static const char *const want[] = {"ay \xc3\xa9", "bee's own", NULL, NULL, "sea", "dee"};
    lg_item item = {0};
    for (uint64_t i = 0; i < LG_ARRAY_LEN(want); i++) {
        int rc = lg_source_read(s, i, &item);
        assert_int_equal(rc, want[i] ? 0 : LG_ERR_VOID);
        if (want[i]) assert_string_equal(item.caption[0], want[i]);
    }
    assert_int_equal(item.n_captions, 2);
    assert_int_equal(lg_source_read(s, 2, &item), LG_ERR_VOID);
    assert_non_null(
        strstr(lg_err_message(), "e: the caption in its line of metadata.jsonl is no string"));
    assert_int_equal(lg_source_read(s, 3, &item), LG_ERR_VOID);
    assert_non_null(strstr(lg_err_message(), "g: has no caption"));
    /* The file must stay what it was. */
    scratch_write("f/metadata.jsonl", "{}");
    assert_int_equal(lg_source_read(s, 0, &item), LG_ERR_IO);
    assert_non_null(strstr(lg_err_message(), "metadata.jsonl has changed"));
    lg_err_clear();
    lg_item_free(&item);
    lg_source_close(&s);
}

static void test_broken_lines(void **state)
{
    (void)state;
    write_png("f/a.png", 1);
    scratch_write("f/metadata.jsonl", "{\"file_name\": \"x.png\"}\n{\"file_name\": \"a.png\", }\n");
    expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG, "f/metadata.jsonl:2");
    expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG, "mend the line, or rename the file");
    scratch_write("f/metadata.jsonl", "[\"a.png\"]\n");
    expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG, "no JSON object");
    scratch_write("f/metadata.jsonl", "{\"file_name\": \"a.png\"}\n{\"file_name\": \"a.png\"}\n");
    expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG,
                   "a.png has two lines of metadata.jsonl, 1 and 2");
    scratch_write("f/metadata.jsonl", "{\"file_name\": 1}\n");
    expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG, "file_name is no string");
}

/* The same of metadata.csv. */
static void test_csv(void **state)
{
    (void)state;
    struct lg_source_options text = {.need_caption = true};
    static const char *const names[] = {"a", "b", "c", "e", "g", "h", "sub/deep/d"};
    for (size_t i = 0; i < LG_ARRAY_LEN(names); i++) {
        char name[64];
        snprintf(name, sizeof name, "f/%s.png", names[i]);
        write_png(name, (int)i);
    }
    scratch_write("f/b.txt", "bee's own");
    scratch_write("f/metadata.csv", "\xef\xbb\xbftext,\"n\",file_name,caption\r\n"
                                    "\" ay, \"\"\xc3\xa9\"\"\r\n2 \",1,a.png,\r\n"
                                    "\r\n"
                                    "bee,2,b.png,\r\n"
                                    "no,,./c.png,sea\r\n"
                                    "nobody's,,gone.png,\"\"\r\n"
                                    "no picture's,,,x\r\n"
                                    ",3,e.png,\"\"\r\n"
                                    "  ,,g.png,\r\n"
                                    "hay\xff,,h.png,");
    scratch_write("f/sub/deep/metadata.csv", "file_name,text\nd.png,dee\n");
    scratch_write("f/sub/deep/metadata.jsonl", "{\"file_name\": \"other.png\"}\n");
    lg_source *s = NULL;
    assert_int_equal(lg_source_open(scratch_path("f"), &text, &s), 0);
    static const char *const want[] = {
        "ay, \"\xc3\xa9\"\r\n2", "bee's own", "sea", NULL, "", "hay\xff", "dee"};
    assert_int_equal(lg_source_count(s), LG_ARRAY_LEN(want));
    assert_int_equal(lg_source_left_out(s)->other, 0);
    lg_item item = {0};
    for (uint64_t i = 0; i < LG_ARRAY_LEN(want); i++) {
        int rc = lg_source_read(s, i, &item);
        assert_int_equal(rc, want[i] ? 0 : LG_ERR_VOID);
        assert_int_equal(item.n_captions, want[i] ? 1 : 0);
        if (want[i]) assert_string_equal(item.caption[0], want[i]);
        if (!want[i]) assert_non_null(strstr(lg_err_message(), "e: has no caption"));
    }
    /* The file must stay what it was. */
    scratch_write("f/sub/deep/metadata.csv", "file_name,text\nd.png,\"ee\n");
    assert_int_equal(lg_source_read(s, 6, &item), LG_ERR_VOID);
    assert_non_null(
        strstr(lg_err_message(), "deep/d: its caption in metadata.csv is no field of CSV"));
    scratch_write("f/sub/deep/metadata.csv", "file_name,text\nd.png,a,b\n");
    assert_int_equal(lg_source_read(s, 6, &item), LG_ERR_VOID);
    scratch_write("f/metadata.csv", "file_name,text\n");
    assert_int_equal(lg_source_read(s, 0, &item), LG_ERR_IO);
    assert_non_null(strstr(lg_err_message(), "metadata.csv has changed"));
    lg_err_clear();
    lg_item_free(&item);
    lg_source_close(&s);
}

/* One folder's captions in three forms: what is read is the same. */
static void test_three_forms(void **state)
{
    (void)state;
    static const char *const folder[] = {"txt", "jsonl", "csv"};
    static const char *const name[] = {"a", "b", "sub/c", "sub/d"};
    static const char *const caption[] = {"a cat, \"asleep\"", "one\ntwo", "caf\xc3\xa9", "\"\""};
    char path[64], all[256] = "";
    for (size_t i = 0; i < LG_ARRAY_LEN(name); i++) {
        for (size_t k = 0; k < LG_ARRAY_LEN(folder); k++) {
            snprintf(path, sizeof path, "%s/%s.png", folder[k], name[i]);
            write_png(path, (int)i);
        }
        snprintf(path, sizeof path, "txt/%s.txt", name[i]);
        scratch_write(path, caption[i]);
        strcat(strcat(all, caption[i]), "|");
    }
    scratch_write("jsonl/metadata.jsonl",
                  "{\"file_name\": \"a.png\", \"text\": \"a cat, \\\"asleep\\\"\"}\n"
                  "{\"file_name\": \"b.png\", \"text\": \"one\\ntwo\"}\n"
                  "{\"file_name\": \"sub/c.png\", \"text\": \"caf\xc3\xa9\"}\n"
                  "{\"file_name\": \"sub/d.png\", \"text\": \"\\\"\\\"\"}\n");
    scratch_write("csv/metadata.csv", "file_name,text\n"
                                      "a.png,\"a cat, \"\"asleep\"\"\"\n"
                                      "b.png,\"one\ntwo\"\n"
                                      "sub/c.png,caf\xc3\xa9\n"
                                      "sub/d.png,\"\"\"\"\"\"\n");
    expect_captions(scratch_path("txt"), all);
    expect_captions(scratch_path("jsonl"), all);
    expect_captions(scratch_path("csv"), all);
    const struct lg_source_options text = {.need_caption = true};
    for (size_t k = 0; k < LG_ARRAY_LEN(folder); k++) {
        lg_source *s = NULL;
        assert_int_equal(lg_source_open(scratch_path(folder[k]), &text, &s), 0);
        lg_source_close(&s);
    }
}

static void test_broken_csv(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"file_name,text\na.png,\"A\n", "f/metadata.csv:2: a quote that does not end"},
        {"file_name,text\na.png,an \"A\"\n", "f/metadata.csv:2: a quote inside a field"},
        {"text,file_name\n\"A\nB\",a.png\nC\n", "f/metadata.csv:4: the record has fewer fields"},
        {"file_name,text\na.png,A,B\n", "f/metadata.csv:2: the record has more fields"},
        {"file_name,text\na.png\n", ": mend the line, or rename the file if it lists no captions"},
        {"file_name,text,file_name\n",
         "f/metadata.csv:1: the header has file_name or a column of captions twice"},
        {"text,file_name,\"text\"\n",
         "f/metadata.csv:1: the header has file_name or a column of captions twice"},
        {"file_name,captions\n", "f/metadata.csv:1: lists in a column captions"},
        {"file_name,text\na.png,A\nb.png,B\n./a.png,C\n",
         "a.png has two lines of metadata.csv, 2 and 4: remove one"},
    };
    write_png("f/a.png", 1);
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        scratch_write("f/metadata.csv", cases[i][0]);
        expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG, cases[i][1]);
    }
    scratch_write("f/metadata.csv", "file_name,text\n\nb.png,B\na.png,A\n");
    scratch_write("f/metadata.jsonl", "{\"file_name\": \"a.png\"}\n");
    expect_no_open(
        scratch_path("f"), NULL, LG_ERR_CONFIG,
        "a.png has two lines, 1 of a metadata.jsonl and 4 of a metadata.csv: remove one");
    char *long_text = malloc(LG_SOURCE_TEXT_BYTES_MAX + 64);
    assert_non_null(long_text);
    const int n = sprintf(long_text, "file_name,text\na.png,");
    memset(long_text + n, 'x', LG_SOURCE_TEXT_BYTES_MAX);
    strcpy(long_text + n + LG_SOURCE_TEXT_BYTES_MAX, "\n");
    scratch_write("f/metadata.csv", long_text);
    free(long_text);
    expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG,
                   "f/metadata.csv:2: the record is longer than 1048576 bytes");
}

/* What the log says while the scratch folder f is opened. */
static void open_and_listen(char ret[1024])
{
    const int saved = dup(STDERR_FILENO);
    FILE *said = tmpfile();
    assert_true(saved >= 0 && said);
    fflush(stderr);
    lg_log_set_level(LG_WARN);
    dup2(fileno(said), STDERR_FILENO);
    lg_source *s = NULL;
    const int rc = lg_source_open(scratch_path("f"), NULL, &s);
    dup2(saved, STDERR_FILENO);
    lg_log_set_level(LG_ERROR);
    close(saved);
    assert_int_equal(rc, 0);
    assert_string_equal(captions_of(s), "");
    lg_source_close(&s);
    rewind(said);
    ret[fread(ret, 1, 1023, said)] = 0;
    fclose(said);
}

/* A metadata.csv that is about something else. */
static void test_other_csv(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"", "no column file_name"},
        {"id,text,text\n1\n2,3,4,5\n", "no column file_name"},
        {"file_name;text\na.png;A\n", "no column file_name"},
        {"file_name,label\na.png,3\na.png,4\n", "no column text or caption"},
        {"file_name,text\n,A\n,B\na.png,\n", "2 lines have no file_name, and are no captions"},
    };
    char said[1024];
    const struct lg_source_options text = {.need_caption = true};
    write_png("f/a.png", 1);
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        scratch_write("f/metadata.csv", cases[i][0]);
        open_and_listen(said);
        const char *at = strstr(said, cases[i][1]);
        if (!at || strstr(at + 1, "metadata.csv")) fail_msg("%s: %s", cases[i][1], said);
        if (i < 4) expect_no_open(scratch_path("f"), &text, LG_ERR_CONFIG, "no caption in");
    }
}

static void test_left_out(void **state)
{
    (void)state;
    write_png("f/b.png", 1);
    scratch_write("f/b.jpg", "the second of this name");
    scratch_write("f/b.txt", "bee");
    scratch_write("f/y.tiff", "");
    scratch_write("f/sub/x.bmp", "");
    scratch_write("f/z.mp4", "");
    scratch_write("f/README.txt", "about these pictures");
    lg_source *s = open_source(scratch_path("f"));
    const struct lg_left_out *out = lg_source_left_out(s);
    assert_int_equal(out->other, 3);
    assert_string_equal(out->first_other, "sub/x.bmp");
    assert_int_equal(out->same, 1);
    assert_string_equal(out->first_same, "b.jpg");
    assert_int_equal(out->alone, 1);
    assert_string_equal(out->first_alone, "README.txt");
    lg_source_close(&s);
}

/* What lies in a folder may be a link, as long as it stays in there. */
static void test_links(void **state)
{
    (void)state;
    char inside[LG_PATH_BYTES], outside[LG_PATH_BYTES];
    write_png("out/secret.png", 9);
    scratch_write("out/secret.txt", "secret");
    write_png("f/b.png", 1);
    scratch_write("f/b.txt", "bee");
    write_png("f/sub/c.png", 2);
    scratch_write("f/sub/c.txt", "sea");
    assert_int_equal(lg_path(inside, "%s", scratch_path("f/b.png")), 0);
    assert_int_equal(lg_path(outside, "%s", scratch_path("out/secret.png")), 0);
    assert_int_equal(symlink("b.png", scratch_path("f/relative.png")), 0);
    assert_int_equal(symlink(inside, scratch_path("f/absolute.png")), 0);
    assert_int_equal(symlink("sub", scratch_path("f/twice")), 0);
    assert_int_equal(symlink("../f/sub/c.png", scratch_path("f/by-its-name.png")), 0);
    lg_source *s = open_source(scratch_path("f"));
    uint64_t count = lg_source_count(s), hash = lg_source_hash(s);
    assert_int_equal(count, 6);
    assert_string_equal(captions_of(s), "bee|sea|sea|");
    lg_source_close(&s);
    assert_int_equal(symlink(outside, scratch_path("f/out.png")), 0);
    assert_int_equal(symlink("../out/secret.txt", scratch_path("f/out.txt")), 0);
    assert_int_equal(symlink("../out", scratch_path("f/outer")), 0);
    write_png("f-not/secret.png", 8); /* a name that begins like the folder's */
    assert_int_equal(symlink("../f-not/secret.png", scratch_path("f/not.png")), 0);
    assert_int_equal(symlink("..", scratch_path("f/sub/up")), 0); /* a circle, inside */
    assert_int_equal(symlink("nowhere", scratch_path("f/gone.png")), 0);
    assert_int_equal(symlink("f", scratch_path("linked")), 0); /* the folder itself may be one */
    s = open_source(scratch_path("linked"));
    assert_int_equal(lg_source_count(s), count);
    assert_true(lg_source_hash(s) == hash);
    /* A link that changes later is not followed out either. */
    lg_item item = {0};
    assert_int_equal(unlink(scratch_path("f/relative.png")), 0);
    assert_int_equal(symlink(outside, scratch_path("f/relative.png")), 0);
    int refused = 0;
    for (uint64_t i = 0; i < count; i++) {
        int rc = lg_source_read(s, i, &item);
        if (rc == 0) continue;
        assert_int_equal(rc, LG_ERR_IO);
        assert_non_null(strstr(lg_err_message(), "relative.png: it leads out of the folder"));
        refused++;
    }
    assert_int_equal(refused, 1);
    lg_item_free(&item);
    lg_source_close(&s);
    lg_err_clear();
    assert_int_equal(lg_remove_tree(scratch_path("f")), 0);
    assert_int_equal(lg_mkdirs(scratch_path("f")), 0);
    assert_int_equal(symlink(outside, scratch_path("f/out.png")), 0);
    expect_no_open(scratch_path("f"), NULL, LG_ERR_CONFIG, "1 links out of the folder");
}

static void test_links_of_shards(void **state)
{
    (void)state;
    assert_int_equal(lg_mkdirs(scratch_path("out")), 0);
    assert_int_equal(lg_mkdirs(scratch_path("shards")), 0);
    make_shard("out/0.tar", 0, 2);
    make_shard("shards/1.tar", 2, 2);
    assert_int_equal(symlink("../out/0.tar", scratch_path("shards/0.tar")), 0);
    assert_int_equal(symlink("1.tar", scratch_path("shards/2.tar")), 0);
    lg_source *s = open_source(scratch_path("shards"));
    assert_int_equal(lg_source_count(s), 4);
    lg_source_close(&s);
    s = open_source(scratch_path("shards/*.tar")); /* asked for by name */
    assert_int_equal(lg_source_count(s), 6);
    lg_source_close(&s);
    assert_int_equal(symlink("nowhere", scratch_path("shards/3.tar")), 0);
    expect_no_open(scratch_path("shards"), NULL, LG_ERR_IO, "3.tar");
    assert_int_equal(unlink(scratch_path("shards/3.tar")), 0);
    assert_int_equal(mkfifo(scratch_path("shards/3.tar"), 0600), 0);
    alarm(10); /* nobody ever writes into it */
    expect_no_open(scratch_path("shards"), NULL, LG_ERR_IO, "not a regular file");
    alarm(0);
}

/* ---- items ---- */

static void test_caption_forms(void **state)
{
    (void)state;
    static const struct {
        const char *extension, *text;
        int rc;
        const char *want; /* captions, joined; or what the message says */
    } cases[] = {
        {"txt", "  a cat \n\n", 0, "a cat|"},
        {"txt", "", 0, "|"},
        {"txt", "\xef\xbb\xbfmarked", 0, "marked|"},
        {"json", "{\"caption\": \"a \\u00e9t\\u00e9\"}", 0, "a \xc3\xa9t\xc3\xa9|"},
        {"json", "{\"captions\": [\"x\", \" y \"]}", 0, "x|y|"},
        {"json", "[\"p\", \"q\"]", 0, "p|q|"},
        {"json", "\"just this\"", 0, "just this|"},
        {"json", "{\"width\": 3}", 0, ""},
        {"json", "{\"caption\": null}", 0, ""},
        {"json", "{\"captions\": [3]}", LG_ERR_VOID, "no string"},
        {"json", "{\"caption\": 3}", LG_ERR_VOID, "no string"},
        {"json", "{\"caption\": \"cut", LG_ERR_VOID, "malformed"},
        {"json", "", LG_ERR_VOID, "malformed"},
        {"json", "{\"caption\": \"a\"} x", LG_ERR_VOID, "malformed"},
        {"json", "{\"caption\": \"a\", \"n\": 01}", LG_ERR_VOID, "malformed"},
        {"json", "{\"caption\": \"a\", \"caption\": \"b\"}", LG_ERR_VOID, "twice"},
        {"json", "{\"x\": {\"caption\": \"a\"}, \"captions\": [\"b\"], \"caption\": \"c\"}", 0,
         "b|"},
        {"json", "{\"x\": [\"caption\", {}], \"caption\": \"a\\tb\xff\"}", 0, "a\tb\xff|"},
        {"cls", " 12 ", 0, ""},
        {"cls", "cat", LG_ERR_VOID, "no class number"},
        {"cls", "-1", LG_ERR_VOID, "no class number"},
        {"cls", "99999999999999999999", LG_ERR_VOID, "no class number"},
    };
    lg_tar_writer *w = tar_open("c.tar");
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        char name[32];
        snprintf(name, sizeof name, "%02zu.png", i);
        put_png(w, name, 0);
        snprintf(name, sizeof name, "%02zu.%s", i, cases[i].extension);
        put_text(w, name, cases[i].text);
    }
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    lg_source *s = open_source(scratch_path("c.tar"));
    assert_int_equal(lg_source_count(s), LG_ARRAY_LEN(cases));
    lg_item item = {0};
    for (size_t i = 0; i < LG_ARRAY_LEN(cases); i++) {
        char got[256] = "", key[32];
        int rc = lg_source_read(s, i, &item);
        if (rc != cases[i].rc) fail_msg("case %zu: %d %s", i, rc, rc ? lg_err_message() : "");
        for (int c = 0; rc == 0 && c < item.n_captions; c++) {
            strcat(got, item.caption[c]);
            strcat(got, "|");
        }
        if (rc == 0) assert_string_equal(got, cases[i].want);
        snprintf(key, sizeof key, "c.tar/%02zu", i);
        assert_string_equal(item.key, key); /* also when void */
        assert_int_equal(item.key_hash, lg_hash(key, strlen(key)));
        if (rc < 0) assert_non_null(strstr(lg_err_message(), cases[i].want));
        if (rc < 0) assert_non_null(strstr(lg_err_message(), key));
    }
    lg_item_free(&item);
    lg_source_close(&s);
}

static void test_grouping(void **state)
{
    (void)state;
    lg_tar_writer *w = tar_open("g.tar");
    put_text(w, "./__meta__.json", "{}");
    put_text(w, "x/.DS_Store", "?");
    put_text(w, "x/1.txt", "first");
    put_png(w, "x/1.png", 10);
    put_text(w, "x/1.url", "ignored");
    put_png(w, "x/1.mask.png", 99); /* another extension, not the picture */
    put_png(w, "y/1.png", 20);      /* the same file name in another folder */
    put_text(w, "z/1.txt", "a caption without a picture");
    put_png(w, "z/2.JPG", 30);
    put_png(w, "z/2.png", 40); /* a second picture: the first is taken */
    assert_int_equal(lg_tar_writer_finish(&w), 0);
    lg_source *s = open_source(scratch_path("g.tar"));
    assert_int_equal(lg_source_count(s), 4);
    static const char *const keys[] = {"g.tar/x/1", "g.tar/y/1", "g.tar/z/1", "g.tar/z/2"};
    static const int shades[] = {10, 20, -1, 30};
    lg_item item = {0};
    lg_picture pic = {0};
    for (int i = 0; i < 4; i++) {
        int rc = lg_source_read(s, (uint64_t)i, &item);
        assert_string_equal(item.key, keys[i]);
        assert_int_equal(rc, shades[i] < 0 ? LG_ERR_VOID : 0);
        if (rc < 0) continue;
        assert_int_equal(lg_picture_decode(item.picture, item.picture_bytes, 0, &pic), 0);
        assert_int_equal(pic.rgb[0], shades[i]);
    }
    lg_picture_free(&pic);
    lg_item_free(&item);
    lg_source_close(&s);
}

/* ---- damage ---- */

static void test_cut_shard(void **state)
{
    (void)state;
    char *whole;
    size_t bytes;
    struct lg_source_options allow = {.allow_truncated = true};
    lg_mkdirs(scratch_path("cut"));
    make_shard("cut/0.tar", 0, 4);
    make_shard("cut/1.tar", 4, 4);
    assert_int_equal(lg_read_file(scratch_path("cut/1.tar"), 1 << 20, &whole, &bytes), 0);
    assert_int_equal(lg_publish_file(scratch_path("cut/1.tar"), whole, bytes / 2), 0);
    char where[64];
    snprintf(where, sizeof where, "cut/1.tar is cut short: it ends at byte %zu", bytes / 2);
    expect_no_open(scratch_path("cut"), NULL, LG_ERR_CORRUPT, where);
    /* A sample is kept exactly when all its members and the next one's header are there. */
    for (size_t at = 0; at < bytes - 1024; at += 512) {
        lg_source *s = NULL;
        assert_int_equal(lg_publish_file(scratch_path("cut/1.tar"), whole, at), 0);
        assert_int_equal(lg_source_open(scratch_path("cut"), &allow, &s), 0);
        uint64_t n = lg_source_count(s), sample = (bytes - 1024) / 4;
        assert_int_equal(n, 4 + (at < sample + 512 ? 0 : (at - 512) / sample));
        lg_source_close(&s);
    }
    free(whole);
}

static void test_io_error_is_not_void(void **state)
{
    (void)state;
    lg_item item = {0};
    const char *path = make_shard("io.tar", 0, 4);
    lg_source *s = open_source(path);
    assert_int_equal(lg_source_read(s, 0, &item), 0);
    assert_int_equal(truncate(path, 600), 0);
    assert_int_equal(lg_source_read(s, 3, &item), LG_ERR_IO);
    assert_string_equal(item.key, "io.tar/00003");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(lg_source_read(s, 3, &item), LG_ERR_IO);
    make_shard("io.tar", 0, 4); /* it comes back, and so does the sample */
    assert_int_equal(lg_source_read(s, 3, &item), 0);
    lg_source_close(&s);
    write_png("iof/1.png", 1);
    s = open_source(scratch_path("iof"));
    assert_int_equal(truncate(scratch_path("iof/1.png"), 20), 0);
    assert_int_equal(lg_source_read(s, 0, &item), LG_ERR_IO);
    assert_int_equal(unlink(scratch_path("iof/1.png")), 0);
    assert_int_equal(lg_source_read(s, 0, &item), LG_ERR_IO);
    lg_source_close(&s);
    lg_item_free(&item);
}

static int open_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static void test_descriptors_are_bounded(void **state)
{
    (void)state;
    enum { SHARDS = LG_SOURCE_FDS_MAX + 20 };
    int before = open_fds();
    lg_mkdirs(scratch_path("many"));
    for (int i = 0; i < SHARDS; i++) {
        char name[32];
        snprintf(name, sizeof name, "many/%03d.tar", i);
        make_shard(name, i, 1);
    }
    lg_source *s = open_source(scratch_path("many"));
    lg_item item = {0};
    for (int i = 0; i < 3 * SHARDS; i++) {
        char want[32];
        int at = i * 37 % SHARDS;
        assert_int_equal(lg_source_read(s, (uint64_t)at, &item), 0);
        snprintf(want, sizeof want, "caption %d", at);
        assert_string_equal(item.caption[0], want);
    }
    assert_int_equal(open_fds(), before + LG_SOURCE_FDS_MAX);
    lg_item_free(&item);
    lg_source_close(&s);
    assert_int_equal(open_fds(), before);
}

static void test_fingerprint(void **state)
{
    (void)state;
    lg_mkdirs(scratch_path("h1"));
    lg_mkdirs(scratch_path("h2"));
    make_shard("h1/a.tar", 0, 3);
    make_shard("h2/a.tar", 0, 3);
    lg_source *a = open_source(scratch_path("h1")), *b = open_source(scratch_path("h2/a.tar"));
    assert_true(lg_source_hash(a) == lg_source_hash(b)); /* where it lies does not matter */
    lg_source_close(&b);
    make_shard("h2/a.tar", 0, 4);
    b = open_source(scratch_path("h2"));
    assert_true(lg_source_hash(a) != lg_source_hash(b));
    lg_source_close(&b);
    make_shard("h2/a.tar", 1, 3); /* other keys, equal sizes */
    b = open_source(scratch_path("h2"));
    assert_true(lg_source_hash(a) != lg_source_hash(b));
    lg_source_close(&a);
    lg_source_close(&b);
}

static lg_source *open_two(double weight, uint64_t repeats)
{
    const struct lg_source_spec two[] = {
        {.path = scratch_path("one"), .repeats = 1, .weight = weight},
        {.path = scratch_path("two"), .repeats = repeats}};
    lg_source *s = NULL;
    if (lg_source_open_all(two, 2, NULL, &s) < 0) fail_msg("%s", lg_err_text());
    return s;
}

/* Items of one after those of the other, under names of their own; what they are and how often they come is the
 * fingerprint. */
static void test_several_sources(void **state)
{
    (void)state;
    scratch_write("one/.here", "");
    make_shard("one/s.tar", 0, 3);
    scratch_write("two/.here", "");
    make_shard("two/s.tar", 3, 2);
    lg_source *s = open_two(0, 2), *alone = open_source(scratch_path("one"));
    char key[LG_PATH_BYTES];
    assert_int_equal(lg_source_count(s), 5);
    assert_string_equal(captions_of(s), "caption 0|caption 1|caption 2|caption 3|caption 4|");
    lg_source_key(s, 0, key);
    assert_string_equal(key, "0:s.tar/00000");
    lg_source_key(s, 4, key);
    assert_string_equal(key, "1:s.tar/00004");
    lg_item item = {0};
    assert_int_equal(lg_source_read(s, 4, &item), 0);
    assert_string_equal(item.key, key);
    assert_int_equal(item.key_hash, lg_hash(key, strlen(key)));
    lg_item_free(&item);
    lg_source_key(alone, 0, key);
    assert_string_equal(key, "s.tar/00000");
    assert_int_equal(lg_source_parts(s), 2);
    struct lg_source_part part = lg_source_part(s, 1);
    assert_true(part.first == 3 && part.count == 2 && part.repeats == 2);
    assert_true(part.share > 4. / 7 - 1e-12 && part.share < 4. / 7 + 1e-12);
    assert_int_equal(lg_source_part_of(s, 2), 0);
    assert_int_equal(lg_source_part_of(s, 3), 1);

    const uint64_t hash = lg_source_hash(s);
    assert_true(hash != lg_source_hash(alone));
    assert_int_equal(lg_source_parts_save(s, hash, scratch_path("data.json")), 0);
    const struct {
        double weight;
        uint64_t repeats;
        bool same;
    } other[] = {{0, 2, true}, {0, 3, false}, {0.5, 2, false}};
    for (size_t i = 0; i < LG_ARRAY_LEN(other); i++) {
        char text[200];
        lg_source *x = open_two(other[i].weight, other[i].repeats);
        assert_int_equal(lg_source_hash(x) == hash, other[i].same);
        lg_source_parts_compare(x, scratch_path("data.json"), hash, text, sizeof text);
        assert_int_equal(strstr(text, "the repeats of data.source[") != NULL, !other[i].same);
        lg_source_close(&x);
    }
    lg_source_close(&s);
    lg_source_close(&alone);
}

static void test_bad_sources(void **state)
{
    (void)state;
    scratch_write("one/.here", "");
    make_shard("one/s.tar", 0, 3);
    scratch_write("none/a.txt", "no picture");
    scratch_write("latents/a.latent.safetensors", "x");
    static const char *const bad[][2] = {
        {"none", "data.source[1]: no picture in "},
        {"gone", "data.source[1]: nothing at "},
        {"latents", "holds latents, unlike the first source"},
    };
    for (size_t i = 0; i < LG_ARRAY_LEN(bad); i++) {
        const struct lg_source_spec two[] = {{.path = scratch_path("one"), .repeats = 1},
                                             {.path = scratch_path(bad[i][0]), .repeats = 1}};
        lg_source *s = NULL;
        assert_int_equal(lg_source_open_all(two, 2, NULL, &s), LG_ERR_CONFIG);
        assert_null(s);
        if (!strstr(lg_err_message(), bad[i][1])) fail_msg("%s", lg_err_message());
    }
    lg_err_clear();
}

/* With buckets an item stands in an epoch as often as it is repeated. */
static void test_repeats_with_buckets(void **state)
{
    (void)state;
    scratch_write("one/.here", "");
    make_shard("one/s.tar", 0, 3);
    scratch_write("two/.here", "");
    make_shard("two/s.tar", 3, 2);
    lg_source *s = open_two(0, 3);
    struct lg_buckets buckets = {.n = 1, .of = {{.height = 8, .width = 8, .rows = 1}}};
    struct lg_item_size *size = NULL;
    struct lg_order_spec spec = {.buckets = &buckets, .ranks = 1, .micros = 1, .micro = 1};
    lg_order *order = NULL;
    assert_int_equal(lg_source_sizes(s, NULL, &size), 0);
    spec.size = size;
    assert_int_equal(lg_source_order(s, &spec, &order), 0);
    const struct lg_sample_rule rule = {.seed = 3, .order = order, .buckets = &buckets};
    int times[5] = {0};
    for (uint64_t n = 0; n < 2 * (3 + 3 * 2); n++) {
        const struct lg_order_place at = lg_source_place(s, &rule, n);
        assert_int_equal(at.epoch, n / 9);
        times[at.item]++;
    }
    for (int i = 0; i < 5; i++) assert_int_equal(times[i], i < 3 ? 2 : 6);
    free(size);
    lg_order_free(&order);
    lg_source_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        SOURCE_TEST(test_places),
        SOURCE_TEST(test_missing_and_empty),
        SOURCE_TEST(test_folder),
        SOURCE_TEST(test_lines),
        SOURCE_TEST(test_broken_lines),
        SOURCE_TEST(test_csv),
        SOURCE_TEST(test_three_forms),
        SOURCE_TEST(test_broken_csv),
        SOURCE_TEST(test_other_csv),
        SOURCE_TEST(test_left_out),
        SOURCE_TEST(test_links),
        SOURCE_TEST(test_links_of_shards),
        SOURCE_TEST(test_caption_forms),
        SOURCE_TEST(test_several_sources),
        SOURCE_TEST(test_bad_sources),
        SOURCE_TEST(test_repeats_with_buckets),
        SOURCE_TEST(test_grouping),
        SOURCE_TEST(test_cut_shard),
        SOURCE_TEST(test_io_error_is_not_void),
        SOURCE_TEST(test_descriptors_are_bounded),
        SOURCE_TEST(test_fingerprint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
